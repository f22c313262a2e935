// What the ranks of a group on one host share: a file without a name, mapped by each of them.
//
//   token | one mailbox a rank | two slots of data a rank
//
// A collective is one or more rounds, and every rank enters every round:
//
//   write my slot [round % 2] and my announcement [round % 2]; publish the round; wait until all have published it;
//   read their slots [round % 2].
//
// So two slots are enough. I write for round n only after I have seen every rank publish round n - 1, which a rank
// does after it has read what it needed of round n - 2: nobody reads what I overwrite. And nobody publishes n + 2
// before I publish n + 1, so that what I read for round n stays as it is while I read it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tp {

// What a rank is about to do; the same on all ranks, or they are out of step. See tp.parallel.native_collectives.
struct Announcement {
  uint16_t operation, dtype;
  uint32_t element_bytes;
  int64_t elements;
  int64_t detail;  // a digest of shapes and sizes, the source, or the columns: what else must be the same

  int64_t bytes() const { return elements * element_bytes; }

  bool operator==(const Announcement& other) const {
    return operation == other.operation && dtype == other.dtype && element_bytes == other.element_bytes &&
           elements == other.elements && detail == other.detail;
  }
};

constexpr int kMostRanks = 64;

enum Presence : uint32_t { kOpen = 0, kClosed = 1, kGaveUp = 2 };

// What one rank writes and all read; alone in its cache lines, of which CPUs may fetch two at a time.
struct alignas(128) Mailbox {
  std::atomic<uint64_t> published;  // the last round whose data is in place
  Announcement announcements[2];
  std::atomic<uint32_t> presence;
  std::atomic<int32_t> process;
};

static_assert(sizeof(Mailbox) == 128, "");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes cannot share a lock of the library");

class Segment {
 public:
  static constexpr int64_t kTokenBytes = 128;
  static constexpr int64_t kPageBytes = 4096;

  static int64_t bytes(int size, int64_t slot_bytes) { return slots_start(size) + 2 * size * slot_bytes; }

  Segment(char* base, int size, int64_t slot_bytes) : base_(base), size_(size), slot_bytes_(slot_bytes) {}

  char* base() const { return base_; }
  int size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  Mailbox& mailbox(int rank) const { return reinterpret_cast<Mailbox*>(base_ + kTokenBytes)[rank]; }
  // Ranks take turns with the slots. So of two ranks, each writes next where it has read last: those cache lines are
  // here already, and go from one core to the other once for each write instead of twice.
  char* slot(int rank, uint64_t round) const {
    const int64_t place = (rank + round / 2) % size_;
    return base_ + slots_start(size_) + (2 * place + static_cast<int64_t>(round % 2)) * slot_bytes_;
  }

 private:
  static int64_t slots_start(int size) {
    const int64_t mailboxes_end = kTokenBytes + size * static_cast<int64_t>(sizeof(Mailbox));
    return (mailboxes_end + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  char* base_;
  int size_;
  int64_t slot_bytes_;
};

}  // namespace tp
