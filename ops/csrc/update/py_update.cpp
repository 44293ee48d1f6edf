// SPDX-License-Identifier: Apache-2.0
//
// The team, the fused Adam and the sampler for Python. Addresses are those of tensors that the caller keeps alive until the
// job is done; every call that may wait gives the GIL back first.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "adam_8bit.h"
#include "blocks.h"
#include "sampler.h"
#include "team.h"

namespace py = pybind11;

namespace {

using tencache::AdamKernel;
using tencache::AdamRun;
using tencache::AdamScalars;
using tencache::AdamTypes;
using tencache::AdamVariant;
using tencache::BLOCK_NUMEL;
using tencache::BlockwiseMaps;
using tencache::BlockwiseRun;
using tencache::BlockwiseScalars;
using tencache::Blocks;
using tencache::Call;
using tencache::ContiguousWeights;
using tencache::DescentKernel;
using tencache::DescentScalars;
using tencache::Digests;
using tencache::ElementType;
using tencache::Job;
using tencache::MasterRun;
using tencache::MasterTuple;
using tencache::MomentMap;
using tencache::RunTuple;
using tencache::SCALE_NUMEL;
using tencache::Sampler;
using tencache::Team;
using tencache::WeightPart;
using tencache::WeightRun;
using tencache::WeightTuple;
using tencache::by_block;
using tencache::check_covered;
using tencache::check_state;
using tencache::cut_blocks;
using tencache::digest_of;
using tencache::digests_for;
using tencache::has_expected_weights;
using tencache::part_numel;

constexpr std::size_t MEMORY_BLOCK_NBYTES = std::size_t{2} << 20;

ElementType element_type(const std::string& name)
{
    if (name == "float32") { return ElementType::float32; }
    if (name == "bfloat16") { return ElementType::bfloat16; }
    if (name == "float16") { return ElementType::float16; }
    throw py::value_error("element type '" + name + "' is not float32, bfloat16 or float16");
}

py::bytes bytes_of(const std::vector<std::uint64_t>& digests)
{
    return py::bytes(reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof(std::uint64_t));
}

class PyJob {
public:
    PyJob(std::shared_ptr<Team> team, std::shared_ptr<Job> job, std::shared_ptr<Digests> digests = nullptr)
        : team_(std::move(team)), job_(std::move(job)), digests_(std::move(digests))
    {
    }

    bool wait(double timeout_s)
    {
        if (done()) { return true; }  // without handing over the interpreter
        py::gil_scoped_release release;
        return team_->wait(job_, timeout_s);
    }

    bool done() const { return team_->finished(job_); }

    std::int64_t end_ns() const { return team_->end_ns(job_); }

    // All of these: once it has ended.
    bool match() const { return digests_ == nullptr || digests_->match; }
    py::bytes digest() const { return digests_ == nullptr ? py::bytes() : bytes_of(digests_->after); }

private:
    std::shared_ptr<Team> team_;
    std::shared_ptr<Job> job_;
    std::shared_ptr<Digests> digests_;
};

class PyTeam {
public:
    explicit PyTeam(int n_threads)
    {
        if (n_threads < 1) { throw py::value_error("n_threads must be positive"); }
        try {
            team_ = std::shared_ptr<Team>(new Team(n_threads), [](Team* team) {
                if (!team->in_forked_child()) { delete team; }
            });
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
            throw py::error_already_set();
        }
    }

    int n_threads() const { return team_->n_threads(); }

    PyJob adam(const std::vector<RunTuple>& runs,
               const std::string& gradient_type,
               const std::string& weight_type,
               std::size_t n_tail,
               const AdamScalars& scalars,
               bool split,
               const std::string& expected,
               const std::string& variant_name)
    {
        const AdamVariant variant = variant_of(variant_name);
        const AdamTypes types{element_type(gradient_type), element_type(weight_type)};
        const AdamKernel kernel = split ? variant.split_kernel : variant.kernel;
        const auto update = [scalars, types, kernel](const AdamRun& part) { kernel(scalars, types, part); };
        return update_runs(runs, types, n_tail, split, expected, update);
    }

    // The runs have no moments; master weights stand in for them.
    PyJob descent(const std::vector<RunTuple>& runs,
                  const std::string& gradient_type,
                  const std::string& weight_type,
                  const DescentScalars& scalars,
                  const std::string& variant_name)
    {
        const AdamTypes types{element_type(gradient_type), element_type(weight_type)};
        const DescentKernel kernel = variant_of(variant_name).descent;
        const auto update = [scalars, types, kernel](const AdamRun& part) { kernel(scalars, types, part); };
        return update_runs(runs, types, 0, false, "", update);
    }

    PyJob blockwise_adam(const std::array<std::uintptr_t, 6>& arrays,
                         std::size_t numel,
                         const std::vector<WeightTuple>& weights,
                         const std::string& gradient_type,
                         const std::string& weight_type,
                         const BlockwiseScalars& scalars,
                         const std::shared_ptr<BlockwiseMaps>& maps,
                         std::uintptr_t marks,
                         const std::string& expected,
                         const std::string& variant_name)
    {
        const AdamVariant variant = variant_of(variant_name);
        const ElementType gradients = element_type(gradient_type), rounded = element_type(weight_type);
        for (const std::uintptr_t address : arrays) {
            if (address == 0) { throw py::value_error("an array has no address"); }
        }
        auto parts = std::make_shared<std::vector<std::vector<WeightPart>>>(
            cut_blocks(weights, numel, element_nbytes(rounded)));
        const bool split = marks != 0;
        if (split) { check_covered(*parts, numel, rounded); }
        auto digests = digests_for(expected, split ? parts->size() : 0);
        auto job = std::make_shared<Job>();
        job->n_blocks = parts->size();
        job->run = [=](std::size_t index) {
            const std::size_t start = index * BLOCK_NUMEL, scale = start / SCALE_NUMEL;
            auto* master = split ? nullptr : reinterpret_cast<float*>(arrays[0]);
            const BlockwiseRun run{
                split ? nullptr : master + start,
                reinterpret_cast<std::uint8_t*>(arrays[1]) + start,
                reinterpret_cast<float*>(arrays[2]) + scale,
                reinterpret_cast<std::uint8_t*>(arrays[3]) + start,
                reinterpret_cast<float*>(arrays[4]) + scale,
                reinterpret_cast<const char*>(arrays[5]) + start * element_nbytes(gradients),
                std::min(BLOCK_NUMEL, numel - start),
                split ? reinterpret_cast<std::uint16_t*>(arrays[0]) + start : nullptr,
                split ? reinterpret_cast<std::uint8_t*>(marks) + start / 8 : nullptr,
            };
            const auto& weights_of_block = (*parts)[index];
            if (!split) {
                variant.blockwise(scalars, *maps, gradients, run);
                for (const WeightPart& part : weights_of_block) {
                    variant.round(rounded, master + part.start, part.weight, part.numel);
                }
                return;
            }
            if (!has_expected_weights(*digests, index, weights_of_block)) { return; }
            ContiguousWeights contiguous(weights_of_block, run.numel);
            variant.split_blockwise(scalars, *maps, gradients, run, contiguous.values());
            contiguous.write_back();
            digests->after[index] = digest_of(weights_of_block);
        };
        return submit(job, digests);
    }

    py::bytes digest(const std::vector<std::tuple<std::uintptr_t, std::size_t>>& runs)
    {
        std::vector<WeightRun> parts;
        std::size_t position = 0;
        for (const auto& [weight, numel] : runs) {
            if (weight == 0) { throw py::value_error("a run has no address"); }
            for (std::size_t start = 0, length; start < numel; start += length) {
                length = part_numel(position + start, numel - start);
                parts.push_back({reinterpret_cast<const std::uint16_t*>(weight) + start, length});
            }
            position += numel;
        }
        auto blocks = std::make_shared<std::vector<std::vector<WeightRun>>>(by_block(parts));
        auto digests = std::make_shared<std::vector<std::uint64_t>>(blocks->size());
        auto job = std::make_shared<Job>();
        job->n_blocks = blocks->size();
        job->run = [blocks, digests](std::size_t index) { (*digests)[index] = digest_of((*blocks)[index]); };
        PyJob under_way = submit(job);
        while (!under_way.wait(60.0)) {}
        return bytes_of(*digests);
    }

    PyJob split(const std::vector<MasterTuple>& runs, const std::string& variant_name, std::uintptr_t marks)
    {
        return over(runs, marks, variant_of(variant_name).split);
    }

    PyJob join(const std::vector<MasterTuple>& runs, const std::string& variant_name, std::uintptr_t marks)
    {
        return over(runs, marks, variant_of(variant_name).join);
    }

    bool splits_exactly(const std::vector<MasterTuple>& runs, const std::string& variant_name, std::uintptr_t marks)
    {
        auto exact = std::make_shared<std::atomic<bool>>(true);
        auto check = [exact, exactly = variant_of(variant_name).splits_exactly](const MasterRun& run) {
            if (*exact && !exactly(run)) { *exact = false; }
        };
        PyJob job = over(runs, marks, check);
        while (!job.wait(60.0)) {}
        return *exact;
    }

    PyJob copy(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes)
    {
        if (target == 0 || source == 0) { throw py::value_error("no address"); }
        auto job = std::make_shared<Job>();
        job->n_blocks = (nbytes + MEMORY_BLOCK_NBYTES - 1) / MEMORY_BLOCK_NBYTES;
        job->run = [target, source, nbytes](std::size_t index) {
            const std::size_t start = index * MEMORY_BLOCK_NBYTES;
            std::memcpy(reinterpret_cast<char*>(target) + start,
                        reinterpret_cast<const char*>(source) + start,
                        std::min(MEMORY_BLOCK_NBYTES, nbytes - start));
        };
        return submit(job);
    }

    void close()
    {
        py::gil_scoped_release release;
        team_->close();
    }

private:
    static AdamVariant variant_of(const std::string& name)
    {
        const AdamVariant variant = name.empty() ? tencache::adam_variant() : tencache::adam_variant(name.c_str());
        if (variant.kernel == nullptr) { throw py::value_error("this processor has no vectors for the fused update"); }
        return variant;
    }

    template <class Update>
    PyJob update_runs(const std::vector<RunTuple>& runs,
                      const AdamTypes& types,
                      std::size_t n_tail,
                      bool split,
                      const std::string& expected,
                      Update update)
    {
        check_state(runs);
        auto blocks = std::make_shared<Blocks>(by_block(cut_blocks(runs, types, n_tail, split)));
        auto digests = digests_for(expected, split ? blocks->size() : 0);
        auto job = std::make_shared<Job>();
        job->n_blocks = blocks->size();
        job->run = [blocks, digests, update, split](std::size_t index) {
            const auto& block = (*blocks)[index];
            if (!has_expected_weights(*digests, index, block)) { return; }
            for (const AdamRun& part : block) { update(part); }
            if (split) { digests->after[index] = digest_of(block); }
        };
        return submit(job, digests);
    }

    template <class Function>
    PyJob over(const std::vector<MasterTuple>& runs, std::uintptr_t marks, Function function)
    {
        auto blocks = std::make_shared<std::vector<MasterRun>>(cut_blocks(runs, marks));
        auto job = std::make_shared<Job>();
        job->n_blocks = blocks->size();
        job->run = [blocks, function](std::size_t index) { function((*blocks)[index]); };
        return submit(job);
    }

    PyJob submit(const std::shared_ptr<Job>& job, const std::shared_ptr<Digests>& digests = nullptr)
    {
        team_->submit(job);
        return PyJob(team_, job, digests);
    }

    std::shared_ptr<Team> team_;
};

void fill_map(MomentMap& map, const std::vector<float>& values, const std::string& codes)
{
    if (values.size() != std::size(map.values) || codes.size() != MomentMap::N_CODES) {
        throw py::value_error("a map has 256 values and 65536 codes");
    }
    std::copy(values.begin(), values.end(), map.values);
    std::memcpy(map.codes, codes.data(), codes.size());
}

using CallTuple = std::pair<std::uintptr_t, std::uintptr_t>;

Call call_of(const CallTuple& addresses)
{
    if (addresses.first == 0) { throw py::value_error("a call has no address"); }
    return {reinterpret_cast<int (*)(void*)>(addresses.first), reinterpret_cast<void*>(addresses.second)};
}

class PySampler {
public:
    PySampler(const std::vector<CallTuple>& preparations,
              const CallTuple& call,
              std::int64_t period_ns,
              std::int64_t lifetime_ns,
              std::size_t capacity)
    {
        if (period_ns < 1 || lifetime_ns < 1 || capacity < 2) {
            throw py::value_error("period_ns and lifetime_ns must be positive, and capacity at least 2");
        }
        std::vector<Call> first;
        for (const CallTuple& each : preparations) { first.push_back(call_of(each)); }
        sampler_ = std::make_unique<Sampler>(std::move(first), call_of(call), period_ns, lifetime_ns, capacity);
    }

    ~PySampler() { close(); }

    void close()
    {
        py::gil_scoped_release release;  // a call may be one of Python's
        sampler_->close();
    }

    std::vector<std::int64_t> times_ns()
    {
        std::vector<std::int64_t> times;
        for (const tencache::Sample& sample : closed().samples()) { times.push_back(sample.t_ns); }
        return times;
    }

    std::vector<int> results()
    {
        std::vector<int> all;
        for (const tencache::Sample& sample : closed().samples()) { all.push_back(sample.result); }
        return all;
    }

    int error() { return closed().error(); }

private:
    const Sampler& closed()
    {
        close();
        return *sampler_;
    }

    std::unique_ptr<Sampler> sampler_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    py::class_<PySampler>(m, "Sampler")
        .def(py::init<const std::vector<CallTuple>&, const CallTuple&, std::int64_t, std::int64_t, std::size_t>(),
             py::kw_only(),
             py::arg("preparations"),
             py::arg("call"),
             py::arg("period_ns"),
             py::arg("lifetime_ns"),
             py::arg("capacity"))
        .def("close", &PySampler::close)
        .def_property_readonly("times_ns", &PySampler::times_ns)
        .def_property_readonly("results", &PySampler::results)
        .def_property_readonly("error", &PySampler::error);
    py::class_<AdamScalars>(m, "AdamScalars")
        .def(py::init([](float scale,
                         float beta1,
                         float one_minus_beta1,
                         float beta2,
                         float one_minus_beta2,
                         float bias_correction2,
                         float eps,
                         float step_size,
                         int weight_decay,
                         float decay) {
                 if (weight_decay < 0 || weight_decay > 2) { throw py::value_error("weight_decay is 0, 1 or 2"); }
                 return AdamScalars{scale,
                                    beta1,
                                    one_minus_beta1,
                                    beta2,
                                    one_minus_beta2,
                                    bias_correction2,
                                    eps,
                                    step_size,
                                    static_cast<tencache::WeightDecay>(weight_decay),
                                    decay};
             }),
             py::kw_only(),
             py::arg("scale"),
             py::arg("beta1"),
             py::arg("one_minus_beta1"),
             py::arg("beta2"),
             py::arg("one_minus_beta2"),
             py::arg("bias_correction2"),
             py::arg("eps"),
             py::arg("step_size"),
             py::arg("weight_decay"),
             py::arg("decay"));
    py::class_<DescentScalars>(m, "DescentScalars")
        .def(py::init([](float scale, float retained, float step) { return DescentScalars{scale, retained, step}; }),
             py::kw_only(),
             py::arg("scale"),
             py::arg("retained"),
             py::arg("step"));
    py::class_<BlockwiseScalars>(m, "BlockwiseScalars")
        .def(py::init([](float scale,
                         float beta1,
                         float one_minus_beta1,
                         float beta2,
                         float one_minus_beta2,
                         float correction2,
                         float eps,
                         float step_size,
                         bool decays,
                         float decay) {
                 return BlockwiseScalars{
                     scale, beta1, one_minus_beta1, beta2, one_minus_beta2, correction2, eps, step_size, decays, decay};
             }),
             py::kw_only(),
             py::arg("scale"),
             py::arg("beta1"),
             py::arg("one_minus_beta1"),
             py::arg("beta2"),
             py::arg("one_minus_beta2"),
             py::arg("correction2"),
             py::arg("eps"),
             py::arg("step_size"),
             py::arg("decays"),
             py::arg("decay"));
    py::class_<BlockwiseMaps, std::shared_ptr<BlockwiseMaps>>(m, "BlockwiseMaps")
        .def(py::init([](const std::vector<float>& first_values,
                         const py::bytes& first_codes,
                         const std::vector<float>& second_values,
                         const py::bytes& second_codes,
                         std::uintptr_t square_root,
                         std::uintptr_t set_threads) {
                 auto maps = std::make_shared<BlockwiseMaps>();
                 fill_map(maps->first, first_values, first_codes);
                 fill_map(maps->second, second_values, second_codes);
                 maps->square_root = reinterpret_cast<tencache::SquareRoot>(square_root);
                 maps->set_threads = reinterpret_cast<tencache::SetThreads>(set_threads);
                 return maps;
             }),
             py::arg("first_values"),
             py::arg("first_codes"),
             py::arg("second_values"),
             py::arg("second_codes"),
             py::arg("square_root"),
             py::arg("set_threads"));
    py::class_<PyJob>(m, "Job")
        .def("wait", &PyJob::wait, py::arg("timeout_s"))
        .def_property_readonly("done", &PyJob::done)
        .def_property_readonly("end_ns", &PyJob::end_ns)
        .def_property_readonly("match", &PyJob::match)
        .def_property_readonly("digest", &PyJob::digest);
    py::class_<PyTeam>(m, "Team")
        .def(py::init<int>(), py::arg("n_threads"))
        .def_property_readonly("n_threads", &PyTeam::n_threads)
        .def("adam",
             &PyTeam::adam,
             py::arg("runs"),
             py::arg("gradient_type"),
             py::arg("weight_type"),
             py::arg("n_tail"),
             py::arg("scalars"),
             py::arg("split") = false,
             py::arg("expected") = py::bytes(),
             py::arg("variant") = "")
        .def("descent",
             &PyTeam::descent,
             py::arg("runs"),
             py::arg("gradient_type"),
             py::arg("weight_type"),
             py::arg("scalars"),
             py::arg("variant") = "")
        .def("blockwise_adam",
             &PyTeam::blockwise_adam,
             py::arg("arrays"),
             py::arg("numel"),
             py::arg("weights"),
             py::arg("gradient_type"),
             py::arg("weight_type"),
             py::arg("scalars"),
             py::arg("maps"),
             py::arg("marks") = 0,
             py::arg("expected") = py::bytes(),
             py::arg("variant") = "")
        .def("digest", &PyTeam::digest, py::arg("runs"))
        .def("split", &PyTeam::split, py::arg("runs"), py::arg("variant") = "", py::arg("marks") = 0)
        .def("join", &PyTeam::join, py::arg("runs"), py::arg("variant") = "", py::arg("marks") = 0)
        .def("splits_exactly", &PyTeam::splits_exactly, py::arg("runs"), py::arg("variant") = "", py::arg("marks") = 0)
        .def("copy", &PyTeam::copy, py::arg("target"), py::arg("source"), py::arg("nbytes"))
        .def("close", &PyTeam::close);
    m.attr("TAIL_CONTRACTED") = tencache::TAIL_CONTRACTED;
    m.def("adam_variant", [] {
        const AdamVariant variant = tencache::adam_variant();
        return std::make_pair(std::string(variant.name), variant.kernel == nullptr ? std::size_t{0} : variant.width);
    });
}
