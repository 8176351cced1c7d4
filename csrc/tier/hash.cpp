#include "tier/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reef {

std::uint64_t hash_bytes(const void* data, std::uint64_t bytes) {
  static const HashBytes wide = hash_with_avx2();
  return wide != nullptr ? wide(data, bytes) : XXH3_64bits(data, bytes);
}

}  // namespace reef
