// SPDX-License-Identifier: Apache-2.0
//
// Lent memory under many threads, on a device of ordinary memory; built with the thread sanitizer by test_lent_memory.py.
//
// Some threads allocate what does not fit and so take loans back; others lend, look at their loans while they hold them,
// and end them. Every byte has to be in device memory or in its image, and the device never gives more than it has.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "lent_memory.h"

namespace {

constexpr std::size_t CAPACITY = 1 << 18;

[[noreturn]] void fail(const char* what)
{
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

class OrdinaryDriver final : public tencache::LendingDriver {
public:
    void* allocate(std::size_t nbytes) override
    {
        std::size_t used = used_nbytes;
        do {
            if (used + nbytes > CAPACITY) return nullptr;
        } while (!used_nbytes.compare_exchange_weak(used, used + nbytes));
        auto* memory = static_cast<std::size_t*>(std::malloc(nbytes + sizeof(std::size_t)));
        *memory = nbytes;
        return memory + 1;
    }
    void free(void* address) override
    {
        auto* memory = static_cast<std::size_t*>(address) - 1;
        used_nbytes -= *memory;
        std::memset(address, 0xCB, *memory);
        std::free(memory);
    }
    bool read(void* host, const void* address, std::size_t nbytes) override
    {
        std::memcpy(host, address, nbytes);
        return true;
    }
    std::int64_t available_nbytes(std::size_t) override { return static_cast<std::int64_t>(CAPACITY - used_nbytes); }

    std::atomic<std::size_t> used_nbytes{0};
};

void borrow(tencache::LentMemory& memory, unsigned seed, int turns)
{
    std::mt19937 random(seed);
    for (int turn = 0; turn < turns; ++turn) {
        const std::size_t nbytes = 1 + random() % (CAPACITY / 6);
        std::vector<unsigned char> image(nbytes);
        const auto [number, address] = memory.lend(nbytes, image.data(), random() % 4);
        if (address == nullptr) continue;
        unsigned char value = 0;
        const std::uint64_t held = random() % 2 ? number : tencache::LentMemory::ALL;
        memory.hold(held);
        if (memory.taken(number)) {  // before anything was written: what the image has is of no interest
            memory.release(held);
            if (memory.end(number)) fail("a loan that was taken back ended as if it was there");
            continue;
        }
        std::memset(address, value = static_cast<unsigned char>(random()), nbytes);
        memory.release(held);
        for (int use = 0; use < 4; ++use) {
            std::this_thread::yield();
            memory.hold(held);
            const bool taken = memory.taken(number);
            auto* bytes = taken ? image.data() : static_cast<unsigned char*>(address);
            for (std::size_t index = 0; index < nbytes; ++index) {
                if (bytes[index] != value) fail("bytes of a loan are not those last written");
            }
            if (!taken) std::memset(bytes, ++value, nbytes);
            memory.release(held);
        }
        memory.end(number);
    }
}

void train(tencache::LentMemory& memory, OrdinaryDriver& driver, unsigned seed, int turns)
{
    std::mt19937 random(seed);
    for (int turn = 0; turn < turns; ++turn) {
        const std::size_t nbytes = 1 + random() % (CAPACITY / 2);
        void* address = driver.allocate(nbytes);
        if (address == nullptr) {
            memory.take_back(random() % 4 == 0 ? tencache::LentMemory::EVERYTHING : static_cast<std::int64_t>(nbytes));
            address = driver.allocate(nbytes);
        }
        std::this_thread::yield();
        if (address != nullptr) driver.free(address);
        if (turn % 16 == 0) memory.set_host_room(random() % 2 ? INT64_MAX / 2 : 0);
    }
}

}  // namespace

int main(int argc, char** argv)
{
    const int turns = argc > 1 ? std::atoi(argv[1]) : 200;
    OrdinaryDriver driver;
    tencache::LentMemory memory(driver);
    memory.set_host_room(INT64_MAX / 2);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back(borrow, std::ref(memory), seed, turns);
        threads.emplace_back(train, std::ref(memory), std::ref(driver), seed + 100, turns);
    }
    for (auto& thread : threads) thread.join();
    if (memory.lent_nbytes() != 0 || driver.used_nbytes != 0) fail("memory is left");
    if (memory.taken_nbytes() == 0) fail("nothing was ever taken back");
    std::printf("%llu bytes taken back, %llu refused\n", static_cast<unsigned long long>(memory.taken_nbytes()),
                static_cast<unsigned long long>(memory.n_refused()));
    return 0;
}
