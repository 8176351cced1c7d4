#include "shard/prepared_load.h"

#include "shard/shard_parts.h"

namespace reef {

PreparedLoad::PreparedLoad(Shard& shard, const std::vector<StateDict>& given)
    : load_(shard.parts_->prepared_load(given)) {}

}  // namespace reef
