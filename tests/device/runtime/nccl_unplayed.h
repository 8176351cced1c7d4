#pragma once

namespace reef::played {

/// Reports that this function is not played, and returns ncclInvalidUsage.
int refuse_unplayed(const char* function);

}  // namespace reef::played
