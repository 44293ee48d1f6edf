// SPDX-License-Identifier: Apache-2.0
//
// Lent memory of CUDA devices, and the hook by which torch's allocator takes it back.
//
// Where no cached block fits, torch's allocator runs its FreeMemoryCallbacks and then asks the driver. A callback is not
// told the size: it makes available what the requests of this step and the one before, which a trace tracker sees, give
// reason to expect (Device::wanted_nbytes). Where that was not enough, the driver has refused, and torch releases cached
// segments before it asks again: at the first of them everything lent is taken back. Whoever lends keeps one in the cache
// for that.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "lent_memory.h"

namespace py = pybind11;
namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

constexpr std::int64_t LEAST_NBYTES = std::int64_t{1} << 30;

// Sets the device for a scope. Nothing here may throw: it runs inside torch's allocator.
class OnDevice {
public:
    explicit OnDevice(int device)
    {
        cudaGetDevice(&former_);
        if (former_ != device) cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(former_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int former_ = 0;
};

class CudaDriver final : public tencache::LendingDriver {
public:
    explicit CudaDriver(int device) : device_(device) {}

    void* allocate(std::size_t nbytes) override
    {
        OnDevice on(device_);
        void* address = nullptr;
        if (cudaMalloc(&address, nbytes) == cudaSuccess) return address;
        cudaGetLastError();  // not to be found by the next kernel
        return nullptr;
    }

    void free(void* address) override
    {
        OnDevice on(device_);
        cudaFree(address);
    }

    bool read(void* host, const void* address, std::size_t nbytes) override
    {
        OnDevice on(device_);
        if (cudaDeviceSynchronize() != cudaSuccess) return false;  // an error of a kernel: its owner will be told
        return cudaMemcpy(host, address, nbytes, cudaMemcpyDeviceToHost) == cudaSuccess;
    }

    std::int64_t available_nbytes(std::size_t lent_nbytes) override
    {
        OnDevice on(device_);
        std::size_t free = 0, total = 0;
        if (cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
        std::int64_t available = static_cast<std::int64_t>(free);
        if (limit_nbytes > 0) {  // of torch's memory, which ours counts as here
            const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device_));
            const std::int64_t used = stats.reserved_bytes[0].current + static_cast<std::int64_t>(lent_nbytes);
            available = std::min(available, limit_nbytes - used);
        }
        return available;
    }

    std::atomic<std::int64_t> limit_nbytes{0};

private:
    int device_;
};

struct Device {
    explicit Device(int index) : driver(index), memory(driver) {}

    CudaDriver driver;
    tencache::LentMemory memory;

    void requested(std::int64_t nbytes)
    {
        raise(largest_of_this_step, nbytes);
        raise(peak, in_use += nbytes);
    }
    void freed(std::int64_t nbytes) { in_use -= nbytes; }
    void record()
    {
        peak_before = peak - in_use;
        in_use = peak = 0;
    }
    // What is to be available: 1.25 times the largest request, but no more than takes this step to the peak of the one
    // before and LEAST_NBYTES beyond: near its peak the largest request has been made.
    std::int64_t wanted_nbytes() const
    {
        const std::int64_t largest = std::max(largest_of_this_step.load(), largest_of_last_step.load());
        const std::int64_t to_peak = std::max(peak.load(), peak_before.load()) - in_use;
        return std::max(LEAST_NBYTES, std::min(largest + largest / 4, to_peak + LEAST_NBYTES));
    }
    void step_done() { largest_of_last_step = largest_of_this_step.exchange(0); }

    std::atomic<std::int64_t> largest_of_this_step{0}, largest_of_last_step{0};
    std::atomic<std::int64_t> in_use{0}, peak{0};  // of torch's memory, beyond what it was at record()
    std::atomic<std::int64_t> peak_before{0};      // before record(), beyond the same

private:
    static void raise(std::atomic<std::int64_t>& highest, std::int64_t nbytes)
    {
        std::int64_t known = highest;
        while (nbytes > known && !highest.compare_exchange_weak(known, nbytes)) {
        }
    }
};

std::mutex opening;
std::array<std::atomic<Device*>, 128> devices{};  // never emptied: the allocator's hooks stay for good

Device* find_device(int index)
{
    const auto position = static_cast<std::size_t>(index);
    return position < devices.size() ? devices[position].load() : nullptr;
}

thread_local bool in_miss = false;  // between a callback and the end of the allocation that ran it

bool is_capturing()
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream().stream(), &status) != cudaSuccess) {
        cudaGetLastError();
        return true;  // a capture of another thread does not allow the question
    }
    return status != cudaStreamCaptureStatusNone;
}

class TakeBack final : public c10::FreeMemoryCallback {
public:
    bool Execute() override
    {
        int index = 0;
        if (cudaGetDevice(&index) != cudaSuccess) return false;
        Device* device = find_device(index);
        if (device == nullptr || device->memory.lent_nbytes() == 0 || is_capturing()) return false;
        in_miss = true;
        device->memory.take_back(device->wanted_nbytes());
        return false;  // what was freed is the driver's, not in a block of torch's
    }
};

void follow(const allocator::TraceEntry& entry)
{
    using Entry = allocator::TraceEntry;
    if (entry.action_ == Entry::ALLOC) {
        in_miss = false;
        Device* device = find_device(entry.device_);
        if (device != nullptr) device->requested(static_cast<std::int64_t>(entry.size_));
    } else if (entry.action_ == Entry::FREE_COMPLETED) {
        Device* device = find_device(entry.device_);
        if (device != nullptr) device->freed(static_cast<std::int64_t>(entry.size_));
    } else if (entry.action_ == Entry::OOM) {
        in_miss = false;
    } else if (in_miss && (entry.action_ == Entry::SEGMENT_FREE || entry.action_ == Entry::SEGMENT_UNMAP)) {
        Device* device = find_device(entry.device_);
        if (device != nullptr && !is_capturing()) device->memory.take_back(tencache::LentMemory::EVERYTHING);
    }
}

Device& open_device(int index)
{
    static bool hooked = false;
    std::lock_guard<std::mutex> lock(opening);
    auto& device = devices.at(static_cast<std::size_t>(index));
    if (!hooked) {
        // Before that there is no allocator of a device yet that a tracker could be attached to.
        if (!allocator::get()->initialized()) throw std::runtime_error("CUDA has to be initialized first");
        allocator::attachAllocatorTraceTracker(follow);  // throws where the allocator is not torch's own
        c10::FreeCudaMemoryCallbacksRegistry()->Register(
            "tencache", []() -> std::unique_ptr<c10::FreeMemoryCallback> { return std::make_unique<TakeBack>(); });
        hooked = true;
    }
    if (device.load() == nullptr) device = new Device(index);
    return *device;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    using unlocked = py::call_guard<py::gil_scoped_release>;
    py::class_<Device, std::unique_ptr<Device, py::nodelete>>(module, "LentMemory")
        .def(
            "lend",
            [](Device& self, std::size_t nbytes, std::uintptr_t image, std::uint64_t rank) {
                const auto [number, address] = self.memory.lend(nbytes, reinterpret_cast<void*>(image), rank);
                return std::make_pair(number, reinterpret_cast<std::uintptr_t>(address));
            },
            unlocked())
        .def("end", [](Device& self, std::uint64_t number) { return self.memory.end(number); }, unlocked())
        .def("hold", [](Device& self, std::uint64_t number) { self.memory.hold(number); }, py::arg("number") = 0, unlocked())
        .def(
            "release", [](Device& self, std::uint64_t number) { self.memory.release(number); }, py::arg("number") = 0,
            unlocked())
        .def("taken", [](Device& self, std::uint64_t number) { return self.memory.taken(number); }, unlocked())
        .def("take_back", [](Device& self, std::int64_t nbytes) { return self.memory.take_back(nbytes); }, unlocked())
        .def("set_host_room", [](Device& self, std::int64_t nbytes) { self.memory.set_host_room(nbytes); }, unlocked())
        .def("set_limit", [](Device& self, std::int64_t nbytes) { self.driver.limit_nbytes = nbytes; })
        .def_property_readonly("lent_nbytes", [](Device& self) { return self.memory.lent_nbytes(); })
        .def_property_readonly("taken_nbytes", [](Device& self) { return self.memory.taken_nbytes(); })
        .def_property_readonly("n_refused", [](Device& self) { return self.memory.n_refused(); })
        .def_property_readonly("peak_nbytes", [](Device& self) { return self.peak.load(); })
        .def("record", &Device::record)
        .def("step_done", &Device::step_done);
    module.def("open_device", &open_device, py::arg("index"), py::return_value_policy::reference);
}
