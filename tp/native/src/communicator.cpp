// The collectives behind a C interface; see communicator_collectives.h. Tensors are contiguous, addresses may be null
// where there is nothing. Each function returns a tp::Status; what it was given must stay until that is kDone, but for
// the announcement, which is copied.

#include "communicator_collectives.h"
#include "tape.h"

namespace tp {
namespace {

// Between more than two ranks, from this size on, each rank sums a part and all copy each other's (measured with three
// and four ranks on two cores: level at 64 KiB, 0.6 to 0.9 of one step's median time above).
constexpr int64_t kTwoStepsFromBytes = 64 * 1024;

// The same numbers as tp.parallel.native_collectives's.
enum Dtype : uint32_t {
  kFloat32, kBFloat16, kFloat16, kFloat64, kBoolean, kUint8, kInt8, kInt16, kInt32, kInt64
};

Place place_of(const Endpoint& endpoint) {
  return {endpoint.rank(), endpoint.segment().size(), endpoint.segment().slot_bytes()};
}

// Calls `work` with a null pointer to elements of the dtype; only those up to kInt64 can be added.
template <typename Work>
Status with_elements(uint32_t dtype, const Work& work) {
  switch (dtype) {
    case kFloat32: return work(static_cast<float*>(nullptr));
    case kBFloat16: return work(static_cast<BFloat16*>(nullptr));
    case kFloat16: return work(static_cast<Float16*>(nullptr));
    case kFloat64: return work(static_cast<double*>(nullptr));
    case kBoolean: return work(static_cast<Boolean*>(nullptr));
    case kUint8:
    case kInt8: return work(static_cast<uint8_t*>(nullptr));
    case kInt16: return work(static_cast<uint16_t*>(nullptr));
    case kInt32: return work(static_cast<uint32_t*>(nullptr));
    default: return work(static_cast<uint64_t*>(nullptr));
  }
}

// The same for those that can be normed.
template <typename Work>
Status with_normed_elements(uint32_t dtype, const Work& work) {
  return dtype == kFloat32 ? work(static_cast<float*>(nullptr)) : work(static_cast<BFloat16*>(nullptr));
}

template <typename T>
SumAddRmsNorm<T> add_rms_norm(int64_t columns, const void* bias, const void* residual, const void* weight, float eps,
                              void* new_residual, void* normed) {
  return {{columns, static_cast<const T*>(bias), static_cast<const T*>(residual), static_cast<const T*>(weight), eps,
           static_cast<T*>(new_residual), static_cast<T*>(normed)}};
}

}  // namespace
}  // namespace tp

extern "C" {

int tp_communicator_all_reduce(tp::Endpoint* endpoint, const tp::Announcement* announced, const void* own, void* to) {
  using namespace tp;
  const Announcement announcement = *announced;
  const Place place = place_of(*endpoint);
  return perform([=] { return with_elements(announcement.dtype, [&](auto* element) -> Status {
    using T = std::remove_pointer_t<decltype(element)>;
    const T* addend = static_cast<const T*>(own);
    T* sum = static_cast<T*>(to);
    const int64_t elements = announcement.elements;
    if (place.size > 2 && announcement.bytes() >= kTwoStepsFromBytes)
      return endpoint->begin(std::make_unique<TwoStepSum<T>>(announcement, place, addend, sum, elements));
    return endpoint->begin(
        std::make_unique<WholeReduce<Sum<T>>>(announcement, place, addend, elements, Sum<T>{sum}));
  }); });
}

// sizes: elements of every rank's part.
int tp_communicator_reduce_scatter(tp::Endpoint* endpoint, const tp::Announcement* announced, const void* own,
                                   void* to, const int64_t* sizes) {
  using namespace tp;
  const Announcement announcement = *announced;
  return perform([=] { return with_elements(announcement.dtype, [&](auto* element) -> Status {
    using T = std::remove_pointer_t<decltype(element)>;
    return endpoint->begin(std::make_unique<ScatteredReduce<Sum<T>>>(
        announcement, place_of(*endpoint), static_cast<const T*>(own), sizes, Sum<T>{static_cast<T*>(to)}));
  }); });
}

// sizes: bytes of every rank's part.
int tp_communicator_all_gather(tp::Endpoint* endpoint, const tp::Announcement* announced, const char* own, char* to,
                               const int64_t* sizes) {
  using namespace tp;
  const Announcement announcement = *announced;
  return perform([=] {
    return endpoint->begin(std::make_unique<AllGather>(announcement, place_of(*endpoint), own, sizes, to));
  });
}

// The announcement's detail is the source.
int tp_communicator_broadcast(tp::Endpoint* endpoint, const tp::Announcement* announced, const char* own, char* to) {
  using namespace tp;
  const Announcement announcement = *announced;
  return perform([=] {
    return endpoint->begin(std::make_unique<Broadcast>(announcement, place_of(*endpoint), own, to));
  });
}

// The announcement's detail is the number of columns.
int tp_communicator_reduce_add_rms_norm(tp::Endpoint* endpoint, const tp::Announcement* announced, const void* own,
                                        const void* bias, const void* residual, const void* weight, float eps,
                                        void* new_residual, void* normed) {
  using namespace tp;
  const Announcement announcement = *announced;
  return perform([=] { return with_normed_elements(announcement.dtype, [&](auto* element) -> Status {
    using T = std::remove_pointer_t<decltype(element)>;
    const int64_t columns = announcement.detail, rows = announcement.elements / columns;
    return endpoint->begin(std::make_unique<WholeReduce<SumAddRmsNorm<T>>>(
        announcement, place_of(*endpoint), static_cast<const T*>(own), rows,
        add_rms_norm<T>(columns, bias, residual, weight, eps, new_residual, normed)));
  }); });
}

// sizes: rows of every rank; residual, new_residual and normed are this rank's rows.
int tp_communicator_reduce_scatter_add_rms_norm(tp::Endpoint* endpoint, const tp::Announcement* announced,
                                                const void* own, const void* bias, const void* residual,
                                                const void* weight, float eps, void* new_residual, void* normed,
                                                const int64_t* sizes, int64_t columns) {
  using namespace tp;
  const Announcement announcement = *announced;
  return perform([=] { return with_normed_elements(announcement.dtype, [&](auto* element) -> Status {
    using T = std::remove_pointer_t<decltype(element)>;
    return endpoint->begin(std::make_unique<ScatteredReduce<SumAddRmsNorm<T>>>(
        announcement, place_of(*endpoint), static_cast<const T*>(own), sizes,
        add_rms_norm<T>(columns, bias, residual, weight, eps, new_residual, normed)));
  }); });
}

}  // extern "C"
