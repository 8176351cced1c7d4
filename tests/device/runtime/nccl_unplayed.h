#pragma once

namespace reef::played {

/// Returns ncclInvalidUsage, with the words that this function is not played.
int refuse_unplayed(const char* function);

}  // namespace reef::played
