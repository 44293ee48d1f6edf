// SPDX-License-Identifier: Apache-2.0
//
// The queue for Python. Every call that may wait gives the GIL back first.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "io_queue.h"

namespace py = pybind11;

namespace {

using tencache::Completion;
using tencache::IoQueue;
using tencache::Operation;
using tencache::Priority;

class PyIoQueue {
public:
    PyIoQueue(int n_lanes, std::int64_t block_nbytes, int queue_depth, std::int64_t background_nbytes)
    {
        if (n_lanes < 1 || queue_depth < 1 || block_nbytes < 4096 || block_nbytes % 4096 != 0 ||
            background_nbytes < 0) {
            throw py::value_error("n_lanes and queue_depth must be positive, block_nbytes a positive multiple of 4096");
        }
        try {
            queue_ = std::make_unique<IoQueue>(
                tencache::QueueOptions{n_lanes, block_nbytes, queue_depth, background_nbytes});
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
            throw py::error_already_set();
        }
    }

    ~PyIoQueue()
    {
        py::gil_scoped_release release;
        queue_.reset();
    }

    bool submit(std::uint64_t id,
                bool write,
                int fd,
                std::int64_t offset,
                std::uintptr_t address,
                std::int64_t nbytes,
                bool urgent)
    {
        if (offset < 0 || nbytes < 1) { throw py::value_error("offset must not be negative, nbytes must be positive"); }
        return queue_->submit({id,
                               write ? Operation::write : Operation::read,
                               urgent ? Priority::urgent : Priority::background,
                               fd,
                               offset,
                               reinterpret_cast<char*>(address),
                               nbytes});
    }

    std::vector<Completion> collect(std::size_t max_n, double timeout_s)
    {
        py::gil_scoped_release release;
        return queue_->collect(max_n, timeout_s);
    }

    int close(double timeout_s, bool drop_waiting)
    {
        py::gil_scoped_release release;
        return queue_->close(timeout_s, drop_waiting);
    }

    IoQueue& queue() { return *queue_; }

private:
    std::unique_ptr<IoQueue> queue_;
};

py::dict stats_of(PyIoQueue& queue)
{
    const auto stats = queue.queue().stats();
    py::dict result;
    result["bytes_read"] = stats.nbytes[0];
    result["bytes_written"] = stats.nbytes[1];
    result["read_ns"] = stats.busy_ns[0];
    result["write_ns"] = stats.busy_ns[1];
    result["n_requests"] = stats.n_requests;
    result["n_short"] = stats.n_short;
    result["n_retries"] = stats.n_retries;
    return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.doc() = "Linux AIO in lanes, with checked results; see io_queue.h";

    py::class_<Completion>(m, "Completion")
        .def_readonly("id", &Completion::id)
        .def_readonly("error", &Completion::error)
        .def_readonly("end_of_file", &Completion::end_of_file)
        .def_readonly("in_flight", &Completion::in_flight)
        .def_readonly("error_offset", &Completion::error_offset)
        .def_readonly("error_nbytes", &Completion::error_nbytes)
        .def_readonly("nbytes_moved", &Completion::nbytes_moved);

    py::class_<PyIoQueue>(m, "IoQueue")
        .def(py::init<int, std::int64_t, int, std::int64_t>(),
             py::arg("n_lanes"),
             py::arg("block_nbytes"),
             py::arg("queue_depth"),
             py::arg("background_nbytes"))
        .def("submit",
             &PyIoQueue::submit,
             py::arg("id"),
             py::arg("write"),
             py::arg("fd"),
             py::arg("offset"),
             py::arg("address"),
             py::arg("nbytes"),
             py::arg("urgent"))
        .def("submit_failed",
             [](PyIoQueue& self, std::uint64_t id, int error) { return self.queue().submit_failed(id, error); },
             py::arg("id"),
             py::arg("error"))
        .def("promote", [](PyIoQueue& self, std::uint64_t id) { return self.queue().promote(id); }, py::arg("id"))
        .def("cancel", [](PyIoQueue& self, std::uint64_t id) { return self.queue().cancel(id); }, py::arg("id"))
        .def("collect", &PyIoQueue::collect, py::arg("max_n"), py::arg("timeout_s"))
        .def("close", &PyIoQueue::close, py::arg("timeout_s"), py::arg("drop_waiting") = false)
        .def_property_readonly("closed", [](PyIoQueue& self) { return self.queue().closed(); })
        .def("stats", &stats_of);
}
