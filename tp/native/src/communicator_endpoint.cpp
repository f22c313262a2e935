#include "communicator_endpoint.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace tp {
namespace {

constexpr int64_t kYieldNs = 2'000'000;      // after spinning, until here: give the core to whoever wants it
constexpr int64_t kShortSleepsNs = 20'000'000;
constexpr int64_t kShortSleepNs = 50'000;
constexpr int64_t kLongSleepNs = 1'000'000;  // an idle rank takes about 1 % of a core
constexpr int64_t kPatienceNs = 100'000'000;  // then the caller may look after signals and peers

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps; false if a signal came, which the caller wants to see at once.
bool doze(int64_t ns) {
  const timespec duration{0, ns};
  return nanosleep(&duration, nullptr) == 0 || errno != EINTR;
}

// A lock on one byte of the file a rank. The kernel releases it however the process ends, and a forked child has no
// share in it. It goes with the first descriptor of the file that the process closes, so each process has only one.
struct flock rank_lock(int rank, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Endpoint::Endpoint(Segment segment, int file, int rank, int64_t spin_ns, Counts* counts)
    : segment_(segment), file_(file), rank_(rank), spin_ns_(spin_ns), counts_(counts) {
  segment_.mailbox(rank).process.store(getpid(), std::memory_order_release);
}

Status Endpoint::begin(std::unique_ptr<Collective> collective) {
  if (in_use_.exchange(true, std::memory_order_acquire)) return kBusy;
  began_ns_ = now_ns();
  collective_ = std::move(collective);
  step_ = 0;
  return resume();
}

Status Endpoint::resume() {
  const char* slots[kMostRanks];
  for (; step_ < collective_->rounds; ++step_) {
    if (!waits_) publish();
    if (!everyone_published()) return kWaiting;
    if (!all_announce_the_same()) return kMismatch;
    for (int rank = 0; rank < segment_.size(); ++rank) slots[rank] = segment_.slot(rank, round_);
    collective_->read(step_, slots);
    waits_ = false;
  }
  counts_->calls += 1;
  counts_->bytes += collective_->announcement.bytes();
  counts_->seconds += 1e-9 * static_cast<double>(now_ns() - began_ns_);
  collective_.reset();
  in_use_.store(false, std::memory_order_release);
  return kDone;
}

void Endpoint::leave(Presence presence) {
  uint32_t open = kOpen;  // the first reason to leave stands
  segment_.mailbox(rank_).presence.compare_exchange_strong(open, presence, std::memory_order_release);
}

void Endpoint::publish() {
  const uint64_t next = round_ + 1;
  Mailbox& own = segment_.mailbox(rank_);
  collective_->write(step_, segment_.slot(rank_, next));
  own.announcements[next % 2] = collective_->announcement;
  own.published.store(next, std::memory_order_release);
  round_ = next;
  waits_ = true;
  waits_since_ns_ = 0;
}

bool Endpoint::published(int rank) const {
  return segment_.mailbox(rank).published.load(std::memory_order_acquire) >= round_;
}

// False after kPatienceNs, or at a signal.
bool Endpoint::everyone_published() {
  constexpr int kSpinsBetweenLooksAtTheClock = 32;
  int64_t called_ns = 0;
  for (int rank = 0; rank < segment_.size(); ++rank) {
    for (int spins = 1; !published(rank); ++spins) {
      relax();
      if (spins % kSpinsBetweenLooksAtTheClock) continue;
      const int64_t now = now_ns();
      if (!waits_since_ns_) waits_since_ns_ = now;
      if (!called_ns) called_ns = now;
      const int64_t waited = now - waits_since_ns_;
      if (waited < spin_ns_) continue;
      spins = -1;  // look at the clock again after each of what follows
      if (now - called_ns > kPatienceNs) return false;
      if (waited < kYieldNs)
        sched_yield();
      else if (!doze(waited < kShortSleepsNs ? kShortSleepNs : kLongSleepNs))
        return false;
    }
  }
  return true;
}

bool Endpoint::all_announce_the_same() const {
  for (int rank = 0; rank < segment_.size(); ++rank)
    if (!(segment_.mailbox(rank).announcements[round_ % 2] == collective_->announcement)) return false;
  return true;
}

}  // namespace tp

extern "C" {

int64_t tp_communicator_segment_bytes(int size, int64_t slot_bytes) { return tp::Segment::bytes(size, slot_bytes); }

// An endpoint over the open `file`, which it owns from now on; null, with errno in *error, where there can be none.
tp::Endpoint* tp_communicator_attach(int file, int rank, int size, int64_t slot_bytes, int64_t spin_ns,
                                     tp::Counts* counts, int* error) {
  struct flock lock = tp::rank_lock(rank, F_WRLCK);
  if (fcntl(file, F_SETLK, &lock) != 0) {
    *error = errno;
    return nullptr;
  }
  void* base = mmap(nullptr, tp::Segment::bytes(size, slot_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) {
    *error = errno;
    return nullptr;
  }
  return new tp::Endpoint(tp::Segment(static_cast<char*>(base), size, slot_bytes), file, rank, spin_ns, counts);
}

void tp_communicator_detach(tp::Endpoint* endpoint) {
  const tp::Segment segment = endpoint->segment();
  endpoint->leave(tp::kClosed);
  munmap(segment.base(), tp::Segment::bytes(segment.size(), segment.slot_bytes()));
  close(endpoint->file());
  delete endpoint;
}

int tp_communicator_resume(tp::Endpoint* endpoint) { return endpoint->resume(); }

void tp_communicator_give_up(tp::Endpoint* endpoint) { endpoint->leave(tp::kGaveUp); }

int64_t tp_communicator_round(const tp::Endpoint* endpoint) { return endpoint->round(); }

// A rank as the others see it: whether its process is still there, the last round it published, its presence, its
// process; and what it announced for this rank's round.
void tp_communicator_look(const tp::Endpoint* endpoint, int rank, int64_t* seen, tp::Announcement* announced) {
  struct flock lock = tp::rank_lock(rank, F_WRLCK);
  const bool known = fcntl(endpoint->file(), F_GETLK, &lock) == 0;
  const tp::Mailbox& mailbox = endpoint->segment().mailbox(rank);
  seen[0] = !known || lock.l_type != F_UNLCK || rank == endpoint->rank();
  // Read after the lock was looked at: what a process did before it ended is seen.
  seen[1] = static_cast<int64_t>(mailbox.published.load(std::memory_order_acquire));
  seen[2] = mailbox.presence.load(std::memory_order_acquire);
  seen[3] = mailbox.process.load(std::memory_order_acquire);
  *announced = mailbox.announcements[endpoint->round() % 2];
}

}  // extern "C"
