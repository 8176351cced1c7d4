"""Reef: training inside a memory budget, for LibTorch and PyTorch.

What C++ users reach through ``reef::reef`` is here under the same names; both run the same code.
"""

from . import optim
from ._library import BuildInfo, build_info, cmake_dir, include_dir, retry_library
from .async_updates import ASYNC_RULES, AsyncEvent, AsyncLog, replay_async, simulate_async
from .budget import (
    Budget,
    BudgetError,
    BudgetOutlook,
    BudgetUse,
    addresses_here,
    budget,
    pin,
    unpin,
)
from .bytes import format_bytes, parse_bytes
from .chain import Chain, ChainPlan, PlannedChain, checkpoint_sequential, plan_of
from .checkpoint import checkpoint, is_undone
from .clip_grad_norm import clip_grad_norm_
from .collectives import all_reduce, barrier, broadcast
from .compression import Compression
from .ddp_hook import DdpHook, ddp_hook
from .delayed_update import DelayedUpdate
from .global_mean import global_mean
from .grad_scaler import GradScaler
from .ledger import CATEGORIES, Ledger, Peak, Timeline, allocator_live_bytes, category_scope
from .linear_scaling import LinearScaling
from .link import Link, LinkFit, LinkSample, bound_link, fit_link, measure_link
from .local_updates import LocalUpdates
from .measure_pipeline import measure_pipeline
from .nonfinite_gradients import NonFiniteElements
from .numerics import count_nonfinite
from .parameter_server import AsyncWorker, ParameterServer
from .part import Part, part_of, set_part, whole_shape_of
from .pipeline import Pipeline, pipeline_micro_batch
from .pipeline_schedule import (
    PIPELINE_SCHEDULES,
    PipelineChunkCost,
    PipelineCost,
    PipelineCosts,
    PipelineGenerator,
    PipelineMessage,
    PipelineRankCost,
    PipelineSchedule,
    PipelineSkip,
    PipelineVersion,
    PipelineVersionRule,
    greedy_pipeline,
    hops_for,
    pipeline_from_block,
    pipemare_rate,
    pipeline_schedule,
)
from .plan_pipeline import PIPELINE_OBJECTIVES, PipelineDivision, PipelinePlan, PipelineProfile, plan_pipeline
from .point_to_point import Message, ireceive, ireceive_into, isend, receive, receive_into, send
from .price_exchange import (
    ExchangePrice,
    ExchangePrices,
    ExchangeWork,
    measure_exchange_work,
    price_exchange,
)
from .process_group import Rendezvous, init_process_group, resolve_rendezvous
from .schedule import (
    CHAIN_SOLVERS,
    ChainProfile,
    Schedule,
    ScheduleCost,
    ScheduleLoad,
    StageProfile,
    plan_chain,
)
from .shard import Shard, shard, shard_of
from .shard_options import MixedPrecision
from .subgroup import subgroup
from .swap import (
    SWAP_POLICIES,
    SwapCost,
    SwapMove,
    SwapPlan,
    SwapSpeeds,
    Trace,
    TraceOperator,
    TracePage,
    plan_swaps,
    simulate,
)
from .tier import Tier, TierSpeed, TierUse, disk_tier, host_tier, pinned_tier

__version__: str = build_info().version

__all__ = [
    "ASYNC_RULES",
    "CATEGORIES",
    "CHAIN_SOLVERS",
    "PIPELINE_OBJECTIVES",
    "PIPELINE_SCHEDULES",
    "SWAP_POLICIES",
    "AsyncEvent",
    "AsyncLog",
    "AsyncWorker",
    "Budget",
    "BudgetError",
    "BudgetOutlook",
    "BudgetUse",
    "BuildInfo",
    "Chain",
    "ChainPlan",
    "ChainProfile",
    "Compression",
    "DdpHook",
    "DelayedUpdate",
    "ExchangePrice",
    "ExchangePrices",
    "ExchangeWork",
    "GradScaler",
    "Ledger",
    "LinearScaling",
    "Link",
    "LinkFit",
    "LinkSample",
    "LocalUpdates",
    "Message",
    "MixedPrecision",
    "NonFiniteElements",
    "ParameterServer",
    "Part",
    "Peak",
    "Pipeline",
    "PipelineChunkCost",
    "PipelineCost",
    "PipelineCosts",
    "PipelineDivision",
    "PipelineGenerator",
    "PipelineMessage",
    "PipelinePlan",
    "PipelineProfile",
    "PipelineRankCost",
    "PipelineSchedule",
    "PipelineSkip",
    "PipelineVersion",
    "PipelineVersionRule",
    "PlannedChain",
    "Rendezvous",
    "Schedule",
    "ScheduleCost",
    "ScheduleLoad",
    "Shard",
    "StageProfile",
    "SwapCost",
    "SwapMove",
    "SwapPlan",
    "SwapSpeeds",
    "Tier",
    "TierSpeed",
    "TierUse",
    "Timeline",
    "Trace",
    "TraceOperator",
    "TracePage",
    "addresses_here",
    "all_reduce",
    "allocator_live_bytes",
    "barrier",
    "bound_link",
    "broadcast",
    "budget",
    "build_info",
    "category_scope",
    "checkpoint",
    "checkpoint_sequential",
    "clip_grad_norm_",
    "cmake_dir",
    "count_nonfinite",
    "ddp_hook",
    "disk_tier",
    "fit_link",
    "format_bytes",
    "global_mean",
    "greedy_pipeline",
    "hops_for",
    "host_tier",
    "include_dir",
    "init_process_group",
    "ireceive",
    "ireceive_into",
    "is_undone",
    "isend",
    "measure_exchange_work",
    "measure_link",
    "measure_pipeline",
    "optim",
    "parse_bytes",
    "part_of",
    "pin",
    "pinned_tier",
    "pipeline_from_block",
    "pipeline_micro_batch",
    "pipemare_rate",
    "pipeline_schedule",
    "plan_chain",
    "plan_of",
    "plan_pipeline",
    "plan_swaps",
    "price_exchange",
    "receive",
    "receive_into",
    "replay_async",
    "resolve_rendezvous",
    "retry_library",
    "send",
    "set_part",
    "shard",
    "shard_of",
    "simulate",
    "simulate_async",
    "subgroup",
    "unpin",
    "whole_shape_of",
]
