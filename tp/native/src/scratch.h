// Working memory that begins where a cache line does.
//
// A load of a register that crosses two lines takes as long as two loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace tp {

constexpr int64_t kCacheLine = 64;  // bytes

template <typename T>
struct CacheLineAllocator {
  using value_type = T;

  CacheLineAllocator() = default;
  template <typename Other>
  CacheLineAllocator(const CacheLineAllocator<Other>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kCacheLine}));
  }
  void deallocate(T* from, std::size_t) { ::operator delete(from, std::align_val_t{kCacheLine}); }

  // Elements without a value are left as the memory was: whoever asks for scratch writes it before it is read.
  void construct(T* place) { ::new (place) T; }
  template <typename Value>
  void construct(T* place, const Value& value) {
    ::new (place) T(value);
  }

  bool operator==(const CacheLineAllocator&) const { return true; }
  bool operator!=(const CacheLineAllocator&) const { return false; }
};

template <typename T>
using Scratch = std::vector<T, CacheLineAllocator<T>>;

// `count` elements, and as many more as fill the last line.
template <typename T>
constexpr int64_t whole_lines(int64_t count) {
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  return (count + kLine - 1) / kLine * kLine;
}

}  // namespace tp
