// A tape of calls, the CPU's counterpart of a CUDA graph.
//
// Every C function of this library that a step may need does its work through `perform`. While a tape is recorded on the
// calling thread, the work is noted as well: addresses and sizes are fixed, what lies at the addresses is not.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace tp {

class Tape {
 public:
  using Work = std::function<int()>;

  static Tape* recording();          // of this thread; null while none is recorded
  static void record(Tape* tape);    // null: no more

  void note(Work work) { calls_.push_back(std::move(work)); }
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }

  // Does the calls again, from number *next on, which becomes the number of the first that is not done yet. Stops after
  // one whose status is not 0, and returns that.
  int replay(int64_t* next) const;

 private:
  std::vector<Work> calls_;
};

template <typename Function>
int perform(const Function& work) {
  if (Tape* tape = Tape::recording()) tape->note(work);
  return work();
}

}  // namespace tp
