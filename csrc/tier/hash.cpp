#include "tier/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reef {

std::uint64_t hash_bytes(const void* data, std::uint64_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace reef
