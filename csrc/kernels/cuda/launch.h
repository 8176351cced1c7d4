#pragma once

/// Launches a kernel with these arguments on a stream. The tests define it for a device that the CPU plays
/// (tests/device/).
#ifndef REEF_LAUNCH
#define REEF_LAUNCH(kernel, blocks, threads, stream, ...) \
  kernel<<<(blocks), (threads), 0, (stream)>>>(__VA_ARGS__)
#endif
