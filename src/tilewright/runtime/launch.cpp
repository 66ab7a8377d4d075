// A Triton kernel among the steps of an executable, without Python: results and scratch are allocated, the kernel is
// sent to the driver, and the results take their slots.
//
// In Python this takes 20 to 40 µs, longer than most kernels of a small model run.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// Layouts as in `launch.py`.
constexpr int INPUTS = 64, OUTPUTS = 16, SCRATCHES = 16, KERNELS = 2, RANK = 8;

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*make_current)(void*);
    int (*stream_of)(int32_t, void**);
    void* context;
};

struct Result {
    int64_t sizes[RANK], strides[RANK];
    int32_t slot, over, dtype, rank;
};

struct Scratch {
    int64_t numbers;
    int32_t dtype, unused;
};

struct Kernel {
    void* function;
    int32_t programs, threads, shared_bytes, unused;
};

struct Step {
    Driver driver;
    Result result[OUTPUTS];
    Scratch scratch[SCRATCHES];
    Kernel kernel[KERNELS];
    int32_t input[INPUTS];
    int32_t device, inputs, results, scratches, kernels, unused;
};

struct Bound {
    Step step;
    std::vector<at::ScalarType> dtypes;
};

constexpr const char* NAME = "tilewright.launch.step";
constexpr int INVALID_CONTEXT = 201;
constexpr uintptr_t ALIGNED = 16;  // what the kernels were compiled for

using at::Tensor;

at::TensorOptions options(const Bound& bound, int dtype) {
    auto device = bound.step.device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, bound.step.device);
    return at::TensorOptions().device(device).dtype(bound.dtypes[dtype]);
}

const Tensor& in_slot(PyObject* slots, int slot) {
    PyObject* found = PyList_GET_ITEM(slots, slot);
    TORCH_CHECK(THPVariable_Check(found), "slot ", slot, " holds no tensor");
    return THPVariable_Unpack(found);
}

// As `TensorSpec.over`: in the storage of one that nobody needs any more, and no view of it.
Tensor over(const Bound& bound, const Result& x, const Tensor& base) {
    at::IntArrayRef sizes(x.sizes, x.rank), strides(x.strides, x.rank);
    if (base.scalar_type() == bound.dtypes[x.dtype] && base.sizes() == sizes && base.strides() == strides) return base;
    Tensor fresh = at::empty({0}, options(bound, x.dtype));
    return fresh.set_(base.storage(), base.storage_offset(), sizes, strides);
}

void launch(const Step& step, void** parameters) {
    void* stream = nullptr;
    TORCH_CHECK(step.driver.stream_of(step.device, &stream) == 0, "PyTorch gives no current stream");
    for (int i = 0; i < step.kernels; ++i) {
        const Kernel& x = step.kernel[i];
        auto send = [&] {
            return step.driver.launch(x.function, x.programs, 1, 1, x.threads, 1, 1, x.shared_bytes, stream, parameters,
                                      nullptr);
        };
        int status = send();
        // A thread that has done nothing on the device yet.
        if (status == INVALID_CONTEXT && step.driver.make_current(step.driver.context) == 0) status = send();
        TORCH_CHECK(status == 0, "the driver refuses a launch of a Triton kernel: CUDA error ", status);
    }
}

bool run(const Bound& bound, PyObject* slots) {
    const Step& step = bound.step;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::DeviceGuard guard(options(bound, 0).device());
    std::array<Tensor, OUTPUTS> results;
    std::array<Tensor, SCRATCHES> scratch;
    // Last come two scratch areas of Triton's, which these kernels do not have.
    void* pointers[INPUTS + OUTPUTS + SCRATCHES + 2] = {};
    int count = 0;
    for (int i = 0; i < step.inputs; ++i) pointers[count++] = in_slot(slots, step.input[i]).data_ptr();
    for (int i = 0; i < step.results; ++i) {
        const Result& x = step.result[i];
        at::IntArrayRef sizes(x.sizes, x.rank), strides(x.strides, x.rank);
        results[i] = x.over < 0 ? at::empty_strided(sizes, strides, options(bound, x.dtype))
                                : over(bound, x, in_slot(slots, x.over));
        pointers[count++] = results[i].data_ptr();
    }
    for (int i = 0; i < step.scratches; ++i) {
        scratch[i] = at::empty({step.scratch[i].numbers}, options(bound, step.scratch[i].dtype));
        pointers[count++] = scratch[i].data_ptr();
    }
    void* parameters[sizeof pointers / sizeof *pointers];
    for (int i = 0; i < count; ++i)
        if ((uintptr_t)pointers[i] % ALIGNED) return false;
    for (int i = 0; i < count + 2; ++i) parameters[i] = pointers + i;
    {
        pybind11::gil_scoped_release free;
        launch(step, parameters);
    }
    for (int i = 0; i < step.results; ++i)
        if (PyList_SetItem(slots, step.result[i].slot, THPVariable_Wrap(results[i]))) throw python_error();
    return true;
}

// step(address of a Step, dtypes that it counts) -> step
PyObject* step(PyObject*, PyObject* const* arguments, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* made = new Bound{*(const Step*)PyLong_AsVoidPtr(arguments[0]), {}};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[1]); ++i)
        made->dtypes.push_back(((THPDtype*)PyTuple_GET_ITEM(arguments[1], i))->scalar_type);
    return PyCapsule_New(made, NAME, [](PyObject* x) { delete (Bound*)PyCapsule_GetPointer(x, NAME); });
    END_HANDLE_TH_ERRORS
}

// run(step, slots) -> whether it ran: not where a pointer is no multiple of 16 bytes
PyObject* run_step(PyObject*, PyObject* const* arguments, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* bound = (const Bound*)PyCapsule_GetPointer(arguments[0], NAME);
    if (!bound) return nullptr;
    return PyBool_FromLong(run(*bound, arguments[1]));
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"step", (PyCFunction)(void*)step, METH_FASTCALL, nullptr},
    {"run", (PyCFunction)(void*)run_step, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilewright_launch", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tilewright_launch() { return PyModule_Create(&module); }
