// SPDX-License-Identifier: Apache-2.0
//
// Device memory that is lent to TenCache's data and taken back by an allocation that would fail otherwise.
//
// Each loan has an image: host memory that gets the bytes when the loan is taken back. Taking back runs inside torch's
// allocator, under its lock and on any thread, which may or may not hold Python's GIL: nothing here calls torch or Python.
// Python learns of it afterwards: whoever is about to use loans holds them first, and then looks which were taken.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace tencache {

// The device. Called under the lock of LentMemory.
struct LendingDriver {
    virtual ~LendingDriver() = default;
    virtual void* allocate(std::size_t nbytes) = 0;  // null: the device has no such memory
    virtual void free(void* address) = 0;            // after all work issued to the device
    virtual bool read(void* host, const void* address, std::size_t nbytes) = 0;  // after all work issued to the device
    virtual std::int64_t available_nbytes(std::size_t lent_nbytes) = 0;  // what an allocation can get beside this
};

class LentMemory {
public:
    static constexpr std::int64_t EVERYTHING = INT64_MAX;
    static constexpr std::uint64_t ALL = 0;  // a number for all loans

    explicit LentMemory(LendingDriver& driver) : driver_(driver) {}

    LentMemory(const LentMemory&) = delete;
    LentMemory& operator=(const LentMemory&) = delete;

    // A number and an address: of new memory, or 0 and null. Of several loans the one of the highest rank is taken back
    // first. The address is no name for a loan: when it was taken back, the next one may have the same.
    std::pair<std::uint64_t, void*> lend(std::size_t nbytes, void* image, std::uint64_t rank)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        void* address = driver_.allocate(nbytes);
        if (address == nullptr) return {0, nullptr};
        loans_[++n_loans_] = Loan{address, nbytes, image, rank, false, 0};
        lent_nbytes_ += nbytes;
        return {n_loans_, address};
    }

    // Ends a loan. Whether its bytes were still in device memory; else its image has had them since it was taken back.
    bool end(std::uint64_t number)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const Loan loan = find(number);
        loans_.erase(number);
        if (loan.taken) return false;
        lent_nbytes_ -= loan.nbytes;
        driver_.free(loan.address);
        return true;
    }

    // Between the two a loan is not taken back, or none is: an allocation that needs memory meanwhile gets that of others,
    // and where there are none, waits a moment for those that are held singly.
    void hold(std::uint64_t number = ALL)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ++(number == ALL ? holds_ : find(number).holds);
    }

    void release(std::uint64_t number = ALL)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (number != ALL && loans_.count(number) == 0) return;  // it had been taken back, and has ended
        int& holds = number == ALL ? holds_ : find(number).holds;
        if (holds == 0) throw std::logic_error("the loan is not held");
        --holds;
        released_.notify_all();
    }

    // Whether a loan was taken back: its bytes are in its image.
    bool taken(std::uint64_t number)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        return find(number).taken;
    }

    // Takes loans back until an allocation can get this much; returns how many bytes were. Any thread, without the GIL.
    std::size_t take_back(std::int64_t wanted_nbytes)
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto deadline = std::chrono::steady_clock::now() + LONGEST_WAIT;
        std::size_t nbytes = 0;
        while (holds_ == 0 && lent_nbytes_ > 0 &&
               (wanted_nbytes == EVERYTHING || driver_.available_nbytes(lent_nbytes_) < wanted_nbytes)) {
            auto next = last();
            if (next == loans_.end()) {
                if (released_.wait_until(lock, deadline) == std::cv_status::timeout) break;
                continue;
            }
            Loan& loan = next->second;
            if (host_room_nbytes_ < static_cast<std::int64_t>(loan.nbytes)) {
                ++n_refused_;
                break;
            }
            if (!driver_.read(loan.image, loan.address, loan.nbytes)) break;
            driver_.free(loan.address);
            loan.taken = true;
            host_room_nbytes_ -= static_cast<std::int64_t>(loan.nbytes);
            lent_nbytes_ -= loan.nbytes;
            taken_nbytes_ += loan.nbytes;
            nbytes += loan.nbytes;
        }
        return nbytes;
    }

    // How much host memory images may come to take.
    void set_host_room(std::int64_t nbytes)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        host_room_nbytes_ = nbytes;
    }

    std::size_t lent_nbytes() const { return lent_nbytes_; }      // in device memory now
    std::uint64_t taken_nbytes() const { return taken_nbytes_; }  // taken back so far
    std::uint64_t n_refused() const { return n_refused_; }        // times that host memory had no room for one

private:
    struct Loan {
        void* address = nullptr;
        std::size_t nbytes = 0;
        void* image = nullptr;
        std::uint64_t rank = 0;
        bool taken = false;
        int holds = 0;
    };

    // Whoever holds a loan issues some work to the device. It may need the GIL for that, which the thread that waits may
    // have.
    static constexpr std::chrono::milliseconds LONGEST_WAIT{100};

    Loan& find(std::uint64_t number)
    {
        auto found = loans_.find(number);
        if (found == loans_.end()) throw std::invalid_argument("no such loan: it has ended before");
        return found->second;
    }

    std::map<std::uint64_t, Loan>::iterator last()
    {
        auto best = loans_.end();
        for (auto each = loans_.begin(); each != loans_.end(); ++each) {
            if (each->second.taken || each->second.holds > 0) continue;
            if (best == loans_.end() || each->second.rank >= best->second.rank) best = each;
        }
        return best;
    }

    LendingDriver& driver_;
    std::mutex mutex_;
    std::condition_variable released_;
    std::map<std::uint64_t, Loan> loans_;
    std::uint64_t n_loans_ = 0;
    std::int64_t host_room_nbytes_ = 0;
    int holds_ = 0;
    std::atomic<std::size_t> lent_nbytes_{0};
    std::atomic<std::uint64_t> taken_nbytes_{0}, n_refused_{0};
};

}  // namespace tencache
