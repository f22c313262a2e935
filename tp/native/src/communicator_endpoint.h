// One rank's end of a segment: it carries out one collective at a time, round by round.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "communicator_segment.h"

namespace tp {

// A collective as one rank was asked for it, cut into rounds that fit the slots.
class Collective {
 public:
  Collective(Announcement announcement, int64_t rounds) : announcement(announcement), rounds(rounds) {}
  virtual ~Collective() = default;
  virtual void write(int64_t round, char* slot) = 0;
  // `slots`: every rank's data of this round, in rank order.
  virtual void read(int64_t round, const char* const* slots) = 0;

  const Announcement announcement;
  const int64_t rounds;  // at least one, even without data, so that ranks out of step are noticed
};

enum Status : int { kDone = 0, kWaiting = 1, kMismatch = 2, kBusy = 3 };

// What an endpoint has done; see tp.parallel.communicator, where it is read, and set to zero.
struct Counts {
  int64_t calls, bytes;
  double seconds;
};

class Endpoint {
 public:
  // counts: kept by the caller for as long as the endpoint is used.
  Endpoint(Segment segment, int file, int rank, int64_t spin_ns, Counts* counts);

  // Starts a collective. kWaiting: peers are late, call `resume`, as often as it says so again.
  // kBusy: another one has not ended. kMismatch: the ranks are in different collectives.
  Status begin(std::unique_ptr<Collective> collective);
  Status resume();

  // Sees to it that nobody waits for this rank.
  void leave(Presence presence);

  int64_t round() const { return static_cast<int64_t>(round_); }
  const Segment& segment() const { return segment_; }
  int file() const { return file_; }
  int rank() const { return rank_; }

 private:
  void publish();
  bool everyone_published();
  bool published(int rank) const;
  bool all_announce_the_same() const;

  const Segment segment_;
  const int file_;
  const int rank_;
  const int64_t spin_ns_;
  Counts* const counts_;
  std::atomic<bool> in_use_{false};
  std::unique_ptr<Collective> collective_;
  int64_t began_ns_ = 0;
  int64_t step_ = 0;     // of the collective's rounds
  uint64_t round_ = 0;   // since the segment was made; what this rank has published
  bool waits_ = false;   // this step is published, and not everyone has
  int64_t waits_since_ns_ = 0;
};

}  // namespace tp
