#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace reef {

/// Whether a bucket of gradients, number `number` of so many in the order of backward, keeps its memory when
/// gradients are cleared. In the C library's heap the holes are too small for what backward makes first, and
/// that would take more memory in the end; but where its last gradients go, activations have gone, and once
/// gradients are cleared, what comes next lies there: of a small GPT 17.7 bytes a parameter at the peak
/// instead of 19.9.
bool stays_in_heap(std::size_t number, std::size_t buckets, c10::Device device);

}  // namespace reef
