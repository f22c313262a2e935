// Work divided over this rank's threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tp {

// Calls work(first, last) for consecutive parts of [0, size), one a thread. The pool of threads is OpenMP's, which
// torch uses too.
template <typename Work>
void in_parallel(int64_t size, int threads, const Work& work) {
  if (threads <= 1 || size < threads) {
    work(0, size);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) work(size * thread / threads, size * (thread + 1) / threads);
}

}  // namespace tp
