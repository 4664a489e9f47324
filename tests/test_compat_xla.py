"""What compilers say is read from short pieces of their texts, as JAX 0.10.2 gets them for TPU v5e, H100 and CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxpp_flax._compat_xla.lines import first_group, laid_out_bytes
from jaxpp_flax._compat_xla.programs import Collective, ProgramText, read_program
from jaxpp_flax._compat_xla.refusals import TooLarge, read_refusal

# A gather that begins in one fusion, goes on in a product, and ends in a third fusion; a reduce-scatter in a fusion.
TPU = """
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }

%begins (p.1: bf16[4,8]) -> (bf16[4,8], bf16[8,8], u32[]) {
  %p.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=3, replica_groups=[2,2]<=[2,2]T(1,0)
  ROOT %begun = (bf16[4,8]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%goes_on (p.2: bf16[4,8], p.3: bf16[8,8]) -> bf16[8,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  %p.3 = bf16[8,8]{1,0} parameter(1)
  %all-gather.2 = bf16[8,8]{1,0} all-gather(%p.2), channel_id=3, replica_groups=[2,2]<=[2,2]T(1,0)
  ROOT %convolution.1 = bf16[8,8]{1,0} convolution(%p.3, %p.3), dim_labels=bf_io->bf
}

%ends (p.4: bf16[4,8]) -> bf16[8,8] {
  %p.4 = bf16[4,8]{1,0} parameter(0)
  %all-gather.3 = bf16[8,8]{1,0} all-gather(%p.4), channel_id=3, replica_groups=[2,2]<=[2,2]T(1,0)
  ROOT %custom-call.2 = bf16[8,8]{1,0} custom-call(%p.4, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (input: bf16[8,8]) -> bf16[4,8] {
  %input = bf16[8,8]{1,0} parameter(0)
  %all-reduce.9 = bf16[8,8]{1,0} all-reduce(%input), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %dynamic-slice.1 = bf16[4,8]{1,0} dynamic-slice(%all-reduce.9, %c, %c), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: bf16[4,8], y: f32[3,5], z: f32[3,5]) -> (bf16[4,8], f32[3,5]) {
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[3,5]{1,0:T(8,128)} parameter(1)
  %z = f32[3,5]{1,0:T(8,128)} parameter(2)
  %copy-start.1 = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, bf16[4,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %start = (bf16[4,8]{1,0}, bf16[8,8]{1,0}, /*index=2*/u32[]{:S(2)}) fusion(%copy-done.1), kind=kCustom, calls=%begins
  %get-tuple-element.1 = bf16[8,8]{1,0} get-tuple-element(%start), index=1
  %product = bf16[8,8]{1,0} fusion(%copy-done.1, %get-tuple-element.1), kind=kOutput, calls=%goes_on
  %more = bf16[8,8]{1,0} add(%product, %product)
  %done = bf16[8,8]{1,0} fusion(%copy-done.1), kind=kCustom, calls=%ends
  %scattered = bf16[4,8]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1
  %offload = (f32[3,5]{1,0:T(8,128)S(5)}, f32[3,5]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%y)
  %between = bf16[4,8]{1,0} multiply(%scattered, %scattered)
  %copy-done.2 = f32[3,5]{1,0:T(8,128)S(5)} copy-done(%offload)
  ROOT %tuple = (bf16[4,8]{1,0:T(8,128)(2,1)}, f32[3,5]{1,0:T(8,128)}) tuple(%between, %z)
}
"""
# A gather that the runtime waits for at once, one beside a product, and a copy of an argument.
GPU = """
HloModule jit_f, is_scheduled=true

%wrapped_copy_computation (p: f32[16,4]) -> f32[16,4] {
  %p = f32[16,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[16,4]{0,1} copy(%p)
}

ENTRY %main (x: f32[16,4], m: f32[16,4]) -> f32[32,4] {
  %x = f32[16,4]{1,0} parameter(0)
  %m = f32[16,4]{1,0} parameter(1)
  %wrapped_copy = f32[16,4]{0,1} fusion(%m), kind=kLoop, calls=%wrapped_copy_computation
  %all-gather-start = (f32[16,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x), replica_groups={{0,2}}, x={"is_sync":true}
  %all-gather-done = f32[32,4]{1,0} all-gather-done(%all-gather-start)
  %all-reduce-start = f32[32,4]{1,0} all-reduce-start(%all-gather-done), replica_groups={{0,1}}, x={"is_sync":false}
  %gemm = f32[16,16]{1,0} custom-call(%x, %wrapped_copy), custom_call_target="__cublas$gemm"
  ROOT %all-reduce-done = f32[32,4]{1,0} all-reduce-done(%all-reduce-start)
}
"""
CPU = """
HloModule jit_f, is_scheduled=true

%body (arg: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %arg = (s32[], f32[8,8]{1,0}) parameter(0)
  %h = f32[8,8]{1,0} get-tuple-element(%arg), index=1
  %all-reduce = f32[8,8]{1,0} all-reduce(%h), replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}
  %permuted = f32[8,8]{1,0} collective-permute(%all-reduce), channel_id=2, source_target_pairs={{0,0},{2,1}}
  ROOT %tuple = (s32[], f32[8,8]{1,0}) tuple(%arg, %permuted)
}

%condition (arg.1: (s32[], f32[8,8])) -> pred[] {
  %arg.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %start = (s32[], f32[8,8]{1,0}) tuple(%x, %x)
  %while = (s32[], f32[8,8]{1,0}) while(%start), condition=%condition, body=%body, x={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%while), index=1
}
"""


def test_tpu_collectives_that_are_fusions():
    found = read_program(TPU)
    gather = Collective(kind="all-gather", nbytes=128, devices=(0, 2), asynchronous=True, work_beside=2)
    assert found.collectives == (gather, Collective(kind="reduce-scatter", nbytes=128, devices=(0, 1)))
    assert found.aliased == (0, 2)
    # The fusions, the sum and the product; not the copies into a cache and to the host, which run beside them.
    assert found.operations == 6


def test_bytes_in_the_tiles_of_a_tpu():
    found = read_program(TPU)
    assert (found.argument_bytes, found.result_bytes) == ((2048, 4096, 4096), (2048, 4096))


def test_copies_to_the_host_run_beside_work_and_those_into_a_cache_are_none():
    (copy,) = read_program(TPU).copies
    assert (copy.what, copy.nbytes, copy.argument) == ("to host", 4096, 1)
    assert (copy.asynchronous, copy.work_beside) == (True, 1)


def test_gpu_pairs_of_start_and_end():
    found = read_program(GPU)
    gather, reduction = found.collectives
    assert gather == Collective(kind="all-gather", nbytes=512, devices=(0, 2))
    assert reduction == Collective(kind="all-reduce", nbytes=512, devices=(0, 1), asynchronous=True, work_beside=1)
    (copy,) = found.copies
    assert (copy.what, copy.argument, copy.nbytes) == ("argument", 1, 256)


def test_a_loop_does_its_collectives_as_often_as_it_turns():
    reduction, permuted = read_program(CPU).collectives
    assert (reduction.times, reduction.devices, reduction.nbytes) == (5, (0, 2), 256)
    assert (permuted.kind, permuted.times, permuted.devices) == ("collective-permute", 5, (2, 1))


@pytest.mark.parametrize(
    "text", ["", "HloModule jit_f", "no program at all {\n  %x = ?\n}", "ENTRY %main () -> f32[] {\n}"]
)
def test_a_text_that_is_unknown_gives_nothing(text: str):
    found = read_program(text)
    assert isinstance(found, ProgramText)
    assert (found.collectives, found.copies, found.operations, found.argument_bytes) == ((), (), 0, ())


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [
        ("replica_groups={{0,4},{1,5}}", (0, 4)),
        ("replica_groups=[4,2]<=[8]", (0, 1)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6)),
        ("replica_groups={}", ()),
    ],
)
def test_groups(attributes: str, devices: Sequence[int]):
    assert first_group(attributes) == devices


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[1000]{0:T(1024)}", 4096),
        ("f32[2,3,5]{0,2,1:T(8,128)}", 3 * 8 * 128 * 4),  # the layout names the axes that the tile cuts
        ("s4[16]{0:E(4)}", 8),
        ("f8e4m3fn[16]{0}", 16),
        ("c64[2]{0}", 16),
    ],
)
def test_types(text: str, nbytes: int):
    assert laid_out_bytes(text) == nbytes


def test_a_refusal_with_its_buffers():
    message = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Over by 1.75G.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(bwd_0)/dot_general"
     Shape: f32[32768,32768]{1,0:T(8,128)}
     Allocation type: HLO temp
     ==========================

  2. Size: 512.0M
     Shape: bf16[16384,16384]{1,0}
     ==========================
"""
    found = read_refusal(message)
    assert found == TooLarge(
        17.5 * 2**30, 15.75 * 2**30,
        (
            (4.0 * 2**30, "f32[32768,32768]{1,0:T(8,128)}, jit(bwd_0)/dot_general, HLO temp"),
            (512.0 * 2**20, "bf16[16384,16384]{1,0}"),
        ),
    )  # fmt: skip
    assert read_refusal("RESOURCE_EXHAUSTED: Out of memory while allocating") == TooLarge(None, None)
    assert read_refusal("UNIMPLEMENTED: f8") is None
