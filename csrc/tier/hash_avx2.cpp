#include "tier/hash.h"

namespace reef {
namespace {

std::uint64_t hash(const void* data, std::uint64_t bytes);

}  // namespace

HashBytes hash_with_avx2() { return __builtin_cpu_supports("avx2") ? &hash : nullptr; }

}  // namespace reef

// What follows is only called where that holds, what is above everywhere.
#pragma GCC target("avx2")
#include <immintrin.h>
#define XXH_VECTOR XXH_AVX2
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reef {
namespace {

std::uint64_t hash(const void* data, std::uint64_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace
}  // namespace reef
