#pragma once

#include "reef/build_info.h"
#include "reef/bytes.h"
#include "reef/category.h"
#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/numerics.h"
#include "reef/process_group.h"
#include "reef/rendezvous.h"
#include "reef/timeline.h"
