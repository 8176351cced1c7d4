#pragma once

/// Launches a kernel with these arguments on a stream. The tests define the macro differently, to run kernels
/// on a device that the CPU emulates (tests/device/).
#ifndef REEF_LAUNCH
#define REEF_LAUNCH(kernel, blocks, threads, stream, ...) \
  kernel<<<(blocks), (threads), 0, (stream)>>>(__VA_ARGS__)
#endif
