// Runs the counting kernel on the host, a thread for each of CUDA's: the same source, with barriers and atomic operations of C++.
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__

struct Index {
  int x = 0, y = 0;
};
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> barrier;

static void __syncthreads() { barrier->arrive_and_wait(); }
template <class T, class U>
static void atomicAdd(T* place, U value) {
  __atomic_fetch_add(place, (T)value, __ATOMIC_RELAXED);
}
static void atomicMax(int* place, int value) {
  int seen = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(place, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static float half_as_float(unsigned short bits) {  // by its definition: sign, 5 bits of exponent, 10 of fraction
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp((float)fraction, -24);
  return bits >> 15 ? -magnitude : magnitude;
}
using std::fma;

#include "histogram.cu"

Words shared[(4 * CODES + 16) / sizeof(Words)];

extern "C" void launch(
    int chunks, int heads, const unsigned short* values, long long batch_stride, long long head_stride, long long row_stride, const int* lengths,
    int batch, int seq, int dim, u64* counts, int* amax, double* sums) {
  gridDim = {chunks, heads};
  barrier = std::make_unique<std::barrier<>>(THREADS);
  for (int head = 0; head < heads; ++head)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      blockIdx = {chunk, head};
      std::memset(shared, 0xA5, sizeof shared);  // what an earlier block left
      std::vector<std::thread> threads;
      for (int thread = 0; thread < THREADS; ++thread)
        threads.emplace_back([=] {
          threadIdx = {thread, 0};
          count(values, batch_stride, head_stride, row_stride, lengths, batch, seq, dim, counts, amax, sums, 4 * BINS);
        });
      for (auto& each : threads) each.join();
    }
}
