#pragma once

// What nearly all tests read, compiled ahead once for them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
