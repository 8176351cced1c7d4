#pragma once

/// Marks what libreef exports. Everything else is hidden (-fvisibility=hidden); tests/policy holds the golden
/// list.
#define REEF_API __attribute__((visibility("default")))
