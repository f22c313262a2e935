#include "tape.h"

namespace tp {
namespace {

thread_local Tape* recorded = nullptr;

}  // namespace

Tape* Tape::recording() { return recorded; }
void Tape::record(Tape* tape) { recorded = tape; }

int Tape::replay(int64_t* next) const {
  int status = 0;
  while (*next < size() && status == 0) status = calls_[(*next)++]();
  return status;
}

}  // namespace tp

extern "C" {

tp::Tape* tp_tape_new() { return new tp::Tape; }
void tp_tape_delete(tp::Tape* tape) { delete tape; }
void tp_tape_record(tp::Tape* tape) { tp::Tape::record(tape); }
int64_t tp_tape_size(const tp::Tape* tape) { return tape->size(); }
int tp_tape_replay(const tp::Tape* tape, int64_t* next) { return tape->replay(next); }

}  // extern "C"
