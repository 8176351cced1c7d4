#pragma once

namespace reef {

/// MKL's vector functions set themselves up at their first call, and a second thread that arrives meanwhile
/// computes its part with their lowest accuracy: seen as a relative error of 3e-4 in the first sqrt of 6 in
/// 1500 processes of two threads (torch 2.15.0). So no two runs of a LibTorch program need be bit-equal, with
/// Reef or without, unless one thread calls such a function first. This does, once in the process; before any
/// operator runs that Reef sees.
void settle_vector_math();

}  // namespace reef
