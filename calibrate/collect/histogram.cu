// Counts the magnitude codes of 16-bit floats and adds up their channels, in one pass over memory. Compiled at run time with these macros:
//   HALF      1: float16, 0: bfloat16
//   WIDE      1: 8 elements a load (16-byte aligned rows, dim a multiple of 8), 0: one
//   SUMS      1: Σx and Σx² of each channel too
//   LOW BINS  codes in [LOW, LOW + BINS) are counted in shared memory, others in the table itself (for GPUs with little shared memory)
//   THREADS   of a block; AHEAD: rows that a thread loads before it counts them
//
// A block takes a run of rows of one head, [batch, heads, seq, dim] as it lies. Its counters stand in shared memory and are added to the head's
// table at the end, non-empty ones only. A thread keeps to its channels from row to row, so that their sums stay in its registers; they are
// added up in a fixed order: the same bits in each run.

typedef unsigned long long u64;
struct alignas(16) Words { unsigned word[4]; };
constexpr int CODES = 32768, LANES = WIDE ? 8 : 1;

#ifdef __CUDACC__  // tests compile all but this for the host
__device__ __forceinline__ float half_as_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

__device__ __forceinline__ double number(unsigned bits) {
#if HALF
  return half_as_float((unsigned short)bits);
#else
  return __uint_as_float(bits << 16);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) count(
    const unsigned short* values, long long batch_stride, long long head_stride, long long row_stride,  // in elements
    const int* lengths,  // [batch], true rows; what lies behind is padding
    int batch, int seq, int dim,
    u64* counts,   // [heads, CODES], added to
    int* amax,     // [heads], raised
    double* sums,  // [chunks, 2, heads, dim], of each block's rows
    int counter_bytes) {
  extern __shared__ Words shared[];  // BINS counters and the highest code
  unsigned* counters = (unsigned*)shared;
  int* highest = (int*)(counters + BINS);
  const int thread = threadIdx.x, chunk = blockIdx.x, chunks = gridDim.x, head = blockIdx.y;
  const int groups = dim / LANES, step = THREADS / groups;  // threads to a row, rows at a time
  const int group = thread % groups, place = thread / groups;
  u64* table = counts + (long long)head * CODES;

  for (int index = thread; index < BINS; index += THREADS) counters[index] = 0;
  if (thread == 0) *highest = 0;
  __syncthreads();

#if SUMS
  double first[LANES], second[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) first[lane] = second[lane] = 0.0;
#endif
  int top = 0;
  const int rows = batch * seq, end = (int)((long long)rows * (chunk + 1) / chunks);
  int row = (int)((long long)rows * chunk / chunks) + place;
  if (place >= step) row = end;  // threads left over beside the last whole row
  int sample = row / seq, at = row % seq;
  values += head * head_stride + group * LANES;
  while (row < end) {
    Words loaded[AHEAD];
    bool real[AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      real[ahead] = row < end && at < lengths[sample];
      if (real[ahead]) {
        const unsigned short* source = values + sample * batch_stride + at * row_stride;
        if (WIDE) loaded[ahead] = *(const Words*)source;
        else loaded[ahead].word[0] = *source;
      }
      row += step;
      at += step;
      while (at >= seq) {
        at -= seq;
        ++sample;
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      if (!real[ahead]) continue;
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) {
        const unsigned bits = lane % 2 ? loaded[ahead].word[lane / 2] >> 16 : loaded[ahead].word[lane / 2] & 0xFFFFu;
        const unsigned code = bits & (CODES - 1), slot = code - LOW;
        if (BINS == CODES || slot < BINS) {
          atomicAdd(&counters[slot], 1u);
        } else {
          atomicAdd(&table[code], (u64)1);
          top = (int)code > top ? (int)code : top;
        }
#if SUMS
        const double value = number(bits);
        first[lane] += value;
        second[lane] = fma(value, value, second[lane]);
#endif
      }
    }
  }
  __syncthreads();

  for (int index = thread; index < BINS; index += THREADS) {
    const unsigned found = counters[index];
    if (found) {
      atomicAdd(&table[LOW + index], (u64)found);
      top = LOW + index > top ? LOW + index : top;
    }
  }
  if (top) atomicMax(highest, top);
  __syncthreads();
  if (thread == 0) atomicMax(&amax[head], *highest);

#if SUMS
  double* partial = (double*)shared;  // [lanes at once, 2, THREADS], in the counters' place
  const int fit = counter_bytes / (THREADS * 16), at_once = fit < LANES ? fit : LANES;
  for (int lane0 = 0; lane0 < LANES; lane0 += at_once) {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
      if (lane >= lane0 && lane < lane0 + at_once) {
        partial[(lane - lane0) * 2 * THREADS + thread] = first[lane];
        partial[((lane - lane0) * 2 + 1) * THREADS + thread] = second[lane];
      }
    }
    __syncthreads();
    for (int item = thread; item < at_once * 2 * groups; item += THREADS) {
      const int which = item / groups, lane = lane0 + which / 2, channel = item % groups * LANES + lane;
      if (lane >= LANES) break;
      double total = 0.0;
      for (int other = 0; other < step; ++other) total += partial[which * THREADS + other * groups + item % groups];
      sums[(((long long)chunk * 2 + which % 2) * gridDim.y + head) * dim + channel] = total;
    }
    __syncthreads();
  }
#endif
}
