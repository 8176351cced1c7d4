// Included by ProcessGroupGloo.hpp, which needs nothing from it. See gloo/context.h of this folder.
#pragma once
