// Work divided over this rank's threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tp {

// Calls work(first, last) for consecutive parts of [0, size), one a thread, on no more threads than there are elements.
// The pool of threads is OpenMP's, which torch uses too.
template <typename Work>
void in_parallel(int64_t size, int64_t most_threads, const Work& work) {
  const int threads = static_cast<int>(std::min(size, most_threads));
  if (threads <= 1) {
    work(0, size);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) work(size * thread / threads, size * (thread + 1) / threads);
}

}  // namespace tp
