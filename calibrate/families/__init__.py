"""The recipe library put to the test: tiny models of each family, the whole job, real vLLM, and the table of what came of it."""
