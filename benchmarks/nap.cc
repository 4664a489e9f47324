// A piece of work for `quote_inside.py`: a device sleeps, and does one piece at a time. The result is zero.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

struct Ordinal {};

template <>
struct xla::ffi::CtxDecoding<Ordinal> {
  using Type = int32_t;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, DiagnosticEngine&) {
    XLA_FFI_DeviceOrdinal_Get_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
    arguments.ctx = context;
    if (api->XLA_FFI_DeviceOrdinal_Get(&arguments) != nullptr) return std::nullopt;
    return arguments.device_ordinal;
  }
};

static std::mutex devices[64];

static ffi::Error Nap(int32_t device, int64_t kind, int64_t nanoseconds, ffi::AnyBuffer weights, ffi::AnyBuffer clock,
                      ffi::Result<ffi::AnyBuffer> zero) {
  std::memset(zero->untyped_data(), 0, zero->size_bytes());
  std::lock_guard<std::mutex> alone(devices[device % 64]);
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    nap, Nap,
    ffi::Ffi::Bind()
        .Ctx<Ordinal>()
        .Attr<int64_t>("kind")
        .Attr<int64_t>("nanoseconds")
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>());
