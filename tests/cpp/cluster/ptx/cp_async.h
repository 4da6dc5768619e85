// In place of csrc/ptx/cp_async.h.
#pragma once

namespace flash::ptx {

using host::Copy;

inline void cp_async_16_zfill(uint32_t target, const void* source, bool valid) {
  host::current->copies.push_back({Copy::kBytes, target, valid ? source : nullptr, nullptr});
  host::perhaps_wait();
}
inline void cp_async_4_zfill(uint32_t target, const void* source, bool valid) {
  host::current->copies.push_back({Copy::kBytes, target, valid ? source : nullptr, nullptr, 4});
  host::perhaps_wait();
}
inline void cp_async_commit() {
  host::current->copies.push_back({Copy::kEndOfGroup, 0, nullptr, nullptr});
}
inline void cp_async_arrive(uint64_t& barrier) {
  host::current->copies.push_back({Copy::kArrival, 0, nullptr, &barrier});
}
inline void cp_async_wait_all() {
  while (!host::current->copies.empty()) host::run_first_copy(*host::current);
}
template <int kPending>
void cp_async_wait() {
  const auto& copies = host::current->copies;
  const auto ends = [](const Copy& x) { return x.what == Copy::kEndOfGroup; };
  while (std::count_if(copies.begin(), copies.end(), ends) > kPending) {
    host::run_first_copy(*host::current);
  }
}

}  // namespace flash::ptx
