// The collectives: what each rank writes in a round, and what it makes of everyone's data.
//
// Sums differ in what is done with the addends (a plain sum, or a sum + residual + norm), and in who wants which part
// of them. A consumer is the former: it is given every rank's addend for some units of the result, in rank order. A
// unit is what must not be cut: an element, or a row for a norm.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "communicator_endpoint.h"
#include "rank_order_sum.h"
#include "rms_norm.h"

namespace tp {

inline int64_t rounds_for(int64_t size, int64_t size_of_a_round) {
  return std::max<int64_t>(1, (size + size_of_a_round - 1) / size_of_a_round);
}

// Part `index` of [0, size), cut into parts of `step`.
struct Piece {
  Piece(int64_t index, int64_t step, int64_t size)
      : start(std::min(size, index * step)), length(std::min(size, (index + 1) * step) - start) {}
  int64_t start, length;
};

// This rank, among how many, and the bytes that it can hand over in one round.
struct Place {
  int rank, size;
  int64_t slot_bytes;
};

template <typename T>
struct Sum {
  using Element = T;
  int64_t unit() const { return 1; }
  T* to;
  void operator()(const T* const* addends, int count, int64_t first, int64_t units) const {
    sum_in_rank_order(addends, count, units, to + first);
  }
};

template <typename T>
struct SumAddRmsNorm {
  using Element = T;
  AddRmsNorm<T> add;
  int64_t unit() const { return add.columns; }
  void operator()(const T* const* addends, int count, int64_t first, int64_t units) const {
    const T* row[kMostRanks];
    for (int64_t i = 0; i < units; ++i) {
      for (int rank = 0; rank < count; ++rank) row[rank] = addends[rank] + i * add.columns;
      add.one_row(row, count, first + i);
    }
  }
};

// Every rank consumes all addends.
template <typename Consumer>
class WholeReduce final : public Collective {
  using T = typename Consumer::Element;

 public:
  WholeReduce(Announcement announcement, Place place, const T* own, int64_t units, Consumer consume)
      : Collective(announcement, rounds_for(units, step(place, consume))),
        place_(place), own_(own), units_(units), step_(step(place, consume)), consume_(consume) {}

  void write(int64_t round, char* slot) override {
    const Piece piece(round, step_, units_);
    std::memcpy(slot, own_ + piece.start * consume_.unit(), piece.length * consume_.unit() * sizeof(T));
  }

  void read(int64_t round, const char* const* slots) override {
    const Piece piece(round, step_, units_);
    const T* addends[kMostRanks];
    for (int rank = 0; rank < place_.size; ++rank) addends[rank] = reinterpret_cast<const T*>(slots[rank]);
    addends[place_.rank] = own_ + piece.start * consume_.unit();
    consume_(addends, place_.size, piece.start, piece.length);
  }

 private:
  static int64_t step(Place place, const Consumer& consume) {
    return place.slot_bytes / (consume.unit() * static_cast<int64_t>(sizeof(T)));
  }

  const Place place_;
  const T* const own_;
  const int64_t units_, step_;
  const Consumer consume_;
};

// Each rank consumes its own range of the addends. In a round, a slot holds a piece of every other rank's range, the
// next rank's first: so a pair's pieces lie at one place, see Segment::slot.
template <typename Consumer>
class ScatteredReduce final : public Collective {
  using T = typename Consumer::Element;

 public:
  // sizes: units of every rank's range, in rank order.
  ScatteredReduce(Announcement announcement, Place place, const T* own, const int64_t* sizes, Consumer consume)
      : Collective(announcement,
                   rounds_for(*std::max_element(sizes, sizes + place.size), step(place, consume))),
        place_(place), own_(own), sizes_(sizes, sizes + place.size), step_(step(place, consume)), consume_(consume) {}

  void write(int64_t round, char* slot) override {
    const T* range = own_;
    for (int rank = 0; rank < place_.size; ++rank) {
      const Piece piece(round, step_, sizes_[rank]);
      if (rank != place_.rank)
        std::memcpy(piece_of(slot, place_.rank, rank), range + piece.start * consume_.unit(),
                    piece.length * consume_.unit() * sizeof(T));
      else
        own_piece_ = range + piece.start * consume_.unit();
      range += sizes_[rank] * consume_.unit();
    }
  }

  void read(int64_t round, const char* const* slots) override {
    const Piece piece(round, step_, sizes_[place_.rank]);
    const T* addends[kMostRanks];
    for (int rank = 0; rank < place_.size; ++rank)
      addends[rank] = rank == place_.rank
                          ? own_piece_
                          : reinterpret_cast<const T*>(piece_of(slots[rank], rank, place_.rank));
    consume_(addends, place_.size, piece.start, piece.length);
  }

 private:
  static int64_t step(Place place, const Consumer& consume) {
    return place.slot_bytes / (place.size - 1) / (consume.unit() * static_cast<int64_t>(sizeof(T)));
  }

  // What `from` has for `to`, another rank, in the slot of `from`.
  template <typename Byte>
  Byte* piece_of(Byte* slot, int from, int to) const {
    const int place = (to - from - 1 + place_.size) % place_.size;
    return slot + place * step_ * consume_.unit() * static_cast<int64_t>(sizeof(T));
  }

  const Place place_;
  const T* const own_;
  const std::vector<int64_t> sizes_;
  const int64_t step_;
  const Consumer consume_;
  const T* own_piece_ = nullptr;
};

// A sum in two steps: each rank adds one part of a slot's worth, then all copy each other's parts. Every addend is
// read once, not once a rank.
template <typename T>
class TwoStepSum final : public Collective {
 public:
  TwoStepSum(Announcement announcement, Place place, const T* own, T* to, int64_t elements)
      : Collective(announcement, 2 * rounds_for(elements, step(place))),
        place_(place), own_(own), to_(to), elements_(elements) {}

  void write(int64_t round, char* slot) override {
    const Piece all(round / 2, step(place_), elements_);
    const Piece mine = part(all, place_.rank);
    if (round % 2)
      std::memcpy(slot, to_ + all.start + mine.start, mine.length * sizeof(T));
    else
      std::memcpy(slot, own_ + all.start, all.length * sizeof(T));
  }

  void read(int64_t round, const char* const* slots) override {
    const Piece all(round / 2, step(place_), elements_);
    if (round % 2)
      copy_parts(all, slots);
    else
      sum_part(all, part(all, place_.rank), slots);
  }

 private:
  static int64_t step(Place place) { return place.slot_bytes / static_cast<int64_t>(sizeof(T)); }

  Piece part(const Piece& all, int rank) const {
    return Piece(rank, (all.length + place_.size - 1) / place_.size, all.length);
  }

  void sum_part(const Piece& all, const Piece& mine, const char* const* slots) {
    const T* addends[kMostRanks];
    for (int rank = 0; rank < place_.size; ++rank)
      addends[rank] = reinterpret_cast<const T*>(slots[rank]) + mine.start;
    sum_in_rank_order(addends, place_.size, mine.length, to_ + all.start + mine.start);
  }

  void copy_parts(const Piece& all, const char* const* slots) {
    for (int rank = 0; rank < place_.size; ++rank) {
      const Piece theirs = part(all, rank);
      if (rank != place_.rank)
        std::memcpy(to_ + all.start + theirs.start, slots[rank], theirs.length * sizeof(T));
    }
  }

  const Place place_;
  const T* const own_;
  T* const to_;
  const int64_t elements_;
};

// Everyone's bytes, one rank's after the other's.
class AllGather final : public Collective {
 public:
  // sizes: bytes of every rank.
  AllGather(Announcement announcement, Place place, const char* own, const int64_t* sizes, char* to)
      : Collective(announcement, rounds_for(*std::max_element(sizes, sizes + place.size), place.slot_bytes)),
        place_(place), own_(own), sizes_(sizes, sizes + place.size), to_(to) {}

  void write(int64_t round, char* slot) override {
    const Piece piece(round, place_.slot_bytes, sizes_[place_.rank]);
    std::memcpy(slot, own_ + piece.start, piece.length);
  }

  void read(int64_t round, const char* const* slots) override {
    char* range = to_;
    for (int rank = 0; rank < place_.size; ++rank) {
      const Piece piece(round, place_.slot_bytes, sizes_[rank]);
      std::memcpy(range + piece.start, rank == place_.rank ? own_ + piece.start : slots[rank], piece.length);
      range += sizes_[rank];
    }
  }

 private:
  const Place place_;
  const char* const own_;
  const std::vector<int64_t> sizes_;
  char* const to_;
};

// One rank's bytes, on every rank; the announcement's detail is that rank.
class Broadcast final : public Collective {
 public:
  Broadcast(Announcement announcement, Place place, const char* own, char* to)
      : Collective(announcement, rounds_for(announcement.bytes(), place.slot_bytes)),
        place_(place), own_(own), source_(static_cast<int>(announcement.detail)), to_(to) {}

  void write(int64_t round, char* slot) override {
    const Piece piece(round, place_.slot_bytes, announcement.bytes());
    if (place_.rank == source_) std::memcpy(slot, own_ + piece.start, piece.length);
  }

  void read(int64_t round, const char* const* slots) override {
    const Piece piece(round, place_.slot_bytes, announcement.bytes());
    const char* from = place_.rank == source_ ? own_ + piece.start : slots[source_];
    std::memcpy(to_ + piece.start, from, piece.length);
  }

 private:
  const Place place_;
  const char* const own_;
  const int source_;
  char* const to_;
};

}  // namespace tp
