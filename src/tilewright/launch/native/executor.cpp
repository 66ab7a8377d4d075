// The executor's face to Python: `recipe`; `program` and `run`; `compiled` and `call_compiled`; `operator`, `call`,
// `known` and `below`.

#include <pthread.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/MemoryFormat.h>

#include "compiled_call.h"
#include "operator.h"

namespace {

using namespace tilewright;

PyObject* mismatch_error = nullptr;
PyObject* index_error = nullptr;

// ---------------------------------------------------------------- plain data from Python

at::ScalarType dtype_from(py::handle x) { return ((THPDtype*)x.ptr())->scalar_type; }

at::Device device_from(py::handle x) { return ((THPDevice*)x.ptr())->device; }

Layout layout_from(py::handle x) {
    py::tuple told = py::reinterpret_borrow<py::tuple>(x);
    return {told[0].cast<std::vector<int64_t>>(), told[1].cast<std::vector<int64_t>>(), dtype_from(told[2]),
            device_from(told[3]), told[4].cast<bool>()};
}

Driver driver_from(py::handle x) {
    auto addresses = x.cast<std::array<uint64_t, 6>>();
    Driver driver;
    static_assert(sizeof driver == sizeof addresses);
    memcpy(&driver, addresses.data(), sizeof driver);
    return driver;
}

Action action_from(const py::tuple& told) {
    Action action{};
    action.act = told[0].cast<int>();
    if (action.act == LAUNCH) {
        action.function = (void*)told[1].cast<uint64_t>();
        auto grid = told[2].cast<std::array<unsigned, 3>>();
        std::copy(grid.begin(), grid.end(), action.grid);
        action.threads = told[3].cast<unsigned>();
        action.shared_bytes = told[4].cast<unsigned>();
        for (auto [kind, tensor, value] : told[5].cast<std::vector<std::tuple<int, int, uint64_t>>>())
            action.arguments.push_back({kind, tensor, value});
    } else {
        action.target = told[1].cast<int>();
        if (action.act == COPY)
            action.source = told[2].cast<int>();
        else
            action.value = told[2].cast<double>();
        if (action.act == FILL && !told[3].is_none()) {
            py::tuple part = told[3];
            action.part = Part{part[0].cast<std::vector<int64_t>>(), part[1].cast<std::vector<int64_t>>(),
                               part[2].cast<int64_t>()};
        }
    }
    return action;
}

TensorMap map_from(const py::tuple& told) {
    TensorMap map{};
    map.dtype = told[0].cast<int>(), map.swizzle = told[1].cast<int>(), map.promotion = told[2].cast<int>();
    map.sizes = told[3].cast<std::vector<uint64_t>>(), map.strides = told[4].cast<std::vector<uint64_t>>();
    map.box = told[5].cast<std::vector<uint32_t>>(), map.steps.assign(map.box.size(), 1);
    return map;
}

Structure structure_from(const py::tuple& told) {
    auto bytes = told[0].cast<std::string>();
    Structure structure{{bytes.begin(), bytes.end()}, {}};
    for (auto [at, kind, tensor, value] : told[1].cast<std::vector<std::tuple<size_t, int, int, uint64_t>>>())
        structure.patches.push_back({at, {kind, tensor, value}});
    return structure;
}

using RecipePointer = std::shared_ptr<const Recipe>;

// (name, device, driver, residues, modulus, buffers, results, actions, maps, structures, advance, keep)
RecipePointer recipe_from(const py::tuple& told) {
    auto recipe = std::make_shared<Recipe>(
        Recipe{told[0].cast<std::string>(), device_from(told[1]), driver_from(told[2]),
               told[3].cast<std::vector<int64_t>>(), told[4].cast<uintptr_t>(), {}, told[6].cast<std::vector<int>>(),
               {}, {}, {}, told[10].cast<uint64_t>(), {}});
    for (py::handle x : told[5]) recipe->buffers.push_back(layout_from(x));
    for (py::handle x : told[7]) recipe->actions.push_back(action_from(py::reinterpret_borrow<py::tuple>(x)));
    for (py::handle x : told[8]) recipe->maps.push_back(map_from(py::reinterpret_borrow<py::tuple>(x)));
    for (py::handle x : told[9]) recipe->structures.push_back(structure_from(py::reinterpret_borrow<py::tuple>(x)));
    for (py::handle x : told[11]) recipe->keep.push_back(THPVariable_Unpack(x.ptr()));
    return recipe;
}

// (layout, a function that gives a pooled tensor, or None)
Fresh fresh_from(py::handle x) {
    py::tuple told = py::reinterpret_borrow<py::tuple>(x);
    return {layout_from(told[0]), told[1].is_none() ? py::object() : py::object(told[1])};
}

// An argument of an operator, of the schema's type: ("slot", n), ("slots", [n, …]), ("fresh", as above) or
// ("constant", value).
Operand operand_from(const py::tuple& told, const c10::TypePtr& type) {
    auto kind = told[0].cast<std::string>();
    if (kind == "constant") return {true, torch::jit::toIValue(told[1], type), {}, false, false, {}};
    if (kind == "slot") return {false, {}, {told[1].cast<int>()}, false, false, {}};
    if (kind == "fresh") return {false, {}, {}, false, false, fresh_from(told[1])};
    c10::TypePtr list = type->kind() == c10::TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType()
                                                                     : type;
    bool is_optional = list->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType;
    return {false, {}, told[1].cast<std::vector<int>>(), true, is_optional, {}};
}

// (name, overload, operands): an operator and its arguments.
void fill_operator(Step& step, const py::tuple& told) {
    step.handle = c10::Dispatcher::singleton().findSchemaOrThrow(told[0].cast<std::string>().c_str(),
                                                                 told[1].cast<std::string>().c_str());
    py::tuple operands = told[2];
    // As for operators called from Python: a number may stand for a tensor.
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    const auto& arguments = step.handle->schema().arguments();
    if (operands.size() != arguments.size()) fail(step.name + " takes " + std::to_string(arguments.size()) + " arguments");
    for (size_t i = 0; i < operands.size(); ++i)
        step.operands.push_back(operand_from(operands[i], arguments[i].real_type()));
}

// (name, overload, operands, results)
void fill_call(Step& step, const py::tuple& told) {
    fill_operator(step, told);
    for (py::handle x : told[3]) {
        py::tuple result = py::reinterpret_borrow<py::tuple>(x);
        bool is_checked = !result[2].is_none();
        step.results.push_back({result[0].cast<int>(), result[1].cast<int>(), is_checked,
                                is_checked ? layout_from(result[2]) : Layout{{}, {}, at::kByte, at::kCPU}});
    }
}

// (kind, name, frees, detail); what `detail` is depends on the kind.
Step step_from(const py::tuple& told) {
    Step step{told[0].cast<int>(), told[1].cast<std::string>(), told[2].cast<std::vector<int>>(), {}, {}, {}, {}, {},
              {}, {}, {{}, {}, at::kByte, at::kCPU}, 0, {}, nullptr, {}, {}};
    py::tuple detail = told[3];
    auto outputs = [&](py::handle list) {
        for (auto [slot, reuses] : list.cast<std::vector<std::pair<int, int>>>()) step.outputs.push_back({slot, reuses});
    };
    switch (step.kind) {
        case RECIPE:
            step.recipe = recipe_in(detail[0]);
            step.inputs = detail[1].cast<std::vector<int>>();
            outputs(detail[2]);
            step.function = detail[3];
            // The operator that the recipe stands for, if any.
            if (detail.size() > 4 && !detail[4].is_none()) fill_operator(step, detail[4]);
            break;
        case CALL: fill_call(step, detail); break;
        case VIEW:
            step.inputs = {detail[0].cast<int>()};
            outputs(detail[1]);
            step.layout = layout_from(detail[2]);
            step.offset = detail[3].cast<int64_t>();
            break;
        case CONSTANT:
            step.constant = THPVariable_Unpack(py::object(detail[0]).ptr());
            outputs(detail[1]);
            break;
        case KERNEL:
            step.kernel = (Kernel)detail[0].cast<uint64_t>();
            step.inputs = detail[1].cast<std::vector<int>>();
            outputs(detail[2]);
            for (py::handle x : detail[3]) step.results_of_kernel.push_back(fresh_from(x));
            step.outside = detail[4].cast<std::string>();
            step.sizes = detail[5].cast<std::vector<int64_t>>();
            break;
        default:
            step.function = detail[0];
            step.inputs = detail[1].cast<std::vector<int>>();
            outputs(detail[2]);
    }
    return step;
}

constexpr const char* PROGRAM_NAME = "tilewright.program";

template <class T>
PyObject* capsule_of(T* made, const char* name, PyCapsule_Destructor destructor) {
    PyObject* capsule = PyCapsule_New(made, name, destructor);
    if (!capsule) delete made;
    return capsule;
}

// ---------------------------------------------------------------- to Python

// recipe(data) -> recipe
PyObject* make_recipe(PyObject*, PyObject* data) {
    HANDLE_TH_ERRORS
    auto* made = new RecipePointer(recipe_from(py::reinterpret_borrow<py::tuple>(data)));
    return capsule_of(made, RECIPE_NAME, [](PyObject* x) { delete (RecipePointer*)PyCapsule_GetPointer(x, RECIPE_NAME); });
    END_HANDLE_TH_ERRORS
}

// program((device, driver or None, slots, inputs, steps, outputs)) -> program
PyObject* make_program(PyObject*, PyObject* data) {
    HANDLE_TH_ERRORS
    py::tuple told = py::reinterpret_borrow<py::tuple>(data);
    auto made = std::make_unique<Program>(
        Program{device_from(told[0]), std::nullopt, told[2].cast<size_t>(), {}, {}, {}, {}, {}, {}, {}});
    if (!told[1].is_none()) made->driver = driver_from(told[1]);
    for (py::handle x : told[3]) {
        py::tuple input = py::reinterpret_borrow<py::tuple>(x);
        made->input_names.push_back("input " + std::to_string(made->input_names.size()));
        made->input_slots.push_back(input[0].cast<int>());
        made->inputs.push_back(input[1].is_none() ? std::nullopt : std::optional(layout_from(input[1])));
    }
    made->taken_over.resize(made->inputs.size());
    for (py::handle x : told[4]) {
        made->steps.push_back(step_from(py::reinterpret_borrow<py::tuple>(x)));
        for (Output& output : made->steps.back().outputs)
            for (size_t i = 0; i < made->input_slots.size(); ++i)
                if (output.reuses == made->input_slots[i]) output.is_given = made->taken_over[i] = true;
    }
    for (py::handle x : told[5]) {
        py::tuple output = py::reinterpret_borrow<py::tuple>(x);
        made->output_slots.push_back(output[0].cast<int>());
        made->output_constants.push_back(output[1]);
    }
    return capsule_of(made.release(), PROGRAM_NAME,
                      [](PyObject* x) { delete (Program*)PyCapsule_GetPointer(x, PROGRAM_NAME); });
    END_HANDLE_TH_ERRORS
}

// run(program, arguments) -> results; does nothing and gives None if a mode computes nothing or a tensor has no memory
PyObject* run_program(PyObject*, PyObject* const* given, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* program = (Program*)PyCapsule_GetPointer(given[0], PROGRAM_NAME);
    if (!program) return nullptr;
    if (!is_plain(PySequence_Fast_ITEMS(given[1]), PyList_GET_SIZE(given[1]))) Py_RETURN_NONE;
    try {
        return run(*program, given[1]);
    } catch (const PlanMismatch& error) {
        PyErr_SetString(mismatch_error, error.what());
        return nullptr;
    } catch (const IndexOutOfBounds& error) {
        PyErr_SetString(index_error, error.what());
        return nullptr;
    }
    END_HANDLE_TH_ERRORS
}

// meet(arguments, whether each is written) -> whether a written one may share memory with another one
PyObject* written_may_meet(PyObject*, PyObject* const* given, Py_ssize_t) {
    HANDLE_TH_ERRORS
    return PyBool_FromLong(may_meet(given[0], given[1]));
    END_HANDLE_TH_ERRORS
}

constexpr const char* COMPILED_NAME = "tilewright.compiled";

// compiled((forward, backward or None, otherwise, stand_in, mark or None, second or None, are_tensors, differentiable,
// detached, tangents, checked, unchecked, disables_autocast, refuses_determinism)) -> compiled; a tangent is (result,
// strides or memory format, may_be_undefined)
PyObject* make_compiled(PyObject*, PyObject* data) {
    HANDLE_TH_ERRORS
    py::tuple told = py::reinterpret_borrow<py::tuple>(data);
    auto function = [](py::handle x) { return x.is_none() ? py::object() : py::reinterpret_borrow<py::object>(x); };
    CompiledCall call{told[0], function(told[1]), told[2], told[3], function(told[4]), function(told[5]),
                      told[6].cast<std::vector<bool>>(), told[7].cast<std::vector<bool>>(),
                      told[8].cast<std::vector<int>>(), {}, told[10].cast<size_t>(), told[11].cast<size_t>(),
                      told[12].cast<bool>(), told[13].cast<bool>()};
    for (py::handle x : told[9]) {
        py::tuple tangent = py::reinterpret_borrow<py::tuple>(x);
        py::object lies = tangent[1];
        Tangent made{tangent[0].cast<int>(), {}, at::MemoryFormat::Contiguous, tangent[2].cast<bool>()};
        if (THPMemoryFormat_Check(lies.ptr()))
            made.format = ((THPMemoryFormat*)lies.ptr())->memory_format;
        else
            made.strides = lies.cast<std::vector<int64_t>>();
        call.tangents.push_back(std::move(made));
    }
    auto* made = new CompiledCallPointer(owned(std::move(call)));
    return capsule_of(made, COMPILED_NAME,
                      [](PyObject* x) { delete (CompiledCallPointer*)PyCapsule_GetPointer(x, COMPILED_NAME); });
    END_HANDLE_TH_ERRORS
}

// call_compiled(compiled, *arguments) -> the results
PyObject* call_compiled_graph(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    auto* found = (CompiledCallPointer*)PyCapsule_GetPointer(given[0], COMPILED_NAME);
    return found ? call_compiled(*found, given + 1, count - 1) : nullptr;
    END_HANDLE_TH_ERRORS
}

// Nodes are shown as those of AOTAutograd are.
void name_nodes() {
    using namespace torch::autograd;
    static PyTypeObject shown;
    static PyMethodDef node_methods[] = {
        {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
        {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
        {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
        {"name", THPCppFunction_name, METH_NOARGS, nullptr},
        {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
        {nullptr},
    };
    static PyGetSetDef node_properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {nullptr}};
    _initFunctionPyTypeObject(shown, "CompiledFunctionBackward", node_properties, node_methods);
    registerCppFunction(typeid(CompiledNode), &shown);
}

constexpr const char* OPERATOR_NAME = "tilewright.operator";

Operator& operator_in(PyObject* capsule) {
    auto* found = (Operator*)PyCapsule_GetPointer(capsule, OPERATOR_NAME);
    if (!found) throw python_error();
    return *found;
}

// (name, function, [(kind, index, constant), …], gives, differentiable)
std::shared_ptr<const Gradient> gradient_from(const py::tuple& told) {
    auto gradient = std::make_shared<Gradient>(
        Gradient{told[0].cast<std::string>(), told[1], {}, told[3].cast<std::vector<int>>(), told[4].cast<size_t>()});
    for (py::handle x : told[2]) {
        py::tuple taken = py::reinterpret_borrow<py::tuple>(x);
        gradient->takes.push_back({taken[0].cast<int>(), taken[1].cast<int>(), taken[2]});
    }
    return gradient;
}

// operator(whether it has one result, function from arguments to recipe or None, gradient or None) -> operator
PyObject* make_operator(PyObject*, PyObject* const* given, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* made = new Operator{given[0] == Py_True, py::reinterpret_borrow<py::object>(given[1]), nullptr, {}};
    if (given[2] != Py_None) made->gradient = gradient_from(py::reinterpret_borrow<py::tuple>(given[2]));
    return capsule_of(made, OPERATOR_NAME, [](PyObject* x) { delete (Operator*)PyCapsule_GetPointer(x, OPERATOR_NAME); });
    END_HANDLE_TH_ERRORS
}

// call(operator, *arguments) -> the result or results, or an Answer
PyObject* call_operator_eagerly(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return call_eagerly(operator_in(given[0]), given + 1, count - 1, Caller::USER);
    END_HANDLE_TH_ERRORS
}

// known(operator, *arguments) -> as `call`, but an Answer if the kind of call is new
PyObject* call_known_operator(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return call_eagerly(operator_in(given[0]), given + 1, count - 1, Caller::CHECKING);
    END_HANDLE_TH_ERRORS
}

// below(operator, *arguments) -> the same, where PyTorch's dispatcher or autograd have seen the call
PyObject* call_operator_below(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return call_below_autograd(operator_in(given[0]), given + 1, count - 1);
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"recipe", make_recipe, METH_O, nullptr},
    {"program", make_program, METH_O, nullptr},
    {"run", (PyCFunction)(void*)run_program, METH_FASTCALL, nullptr},
    {"meet", (PyCFunction)(void*)written_may_meet, METH_FASTCALL, nullptr},
    {"compiled", make_compiled, METH_O, nullptr},
    {"call_compiled", (PyCFunction)(void*)call_compiled_graph, METH_FASTCALL, nullptr},
    {"operator", (PyCFunction)(void*)make_operator, METH_FASTCALL, nullptr},
    {"call", (PyCFunction)(void*)call_operator_eagerly, METH_FASTCALL, nullptr},
    {"known", (PyCFunction)(void*)call_known_operator, METH_FASTCALL, nullptr},
    {"below", (PyCFunction)(void*)call_operator_below, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tilewright_executor", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tilewright_executor() {
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    mismatch_error = PyErr_NewException("tilewright_executor.PlanMismatch", PyExc_RuntimeError, nullptr);
    if (PyModule_AddObjectRef(module, "PlanMismatch", mismatch_error)) return nullptr;
    index_error = PyErr_NewException("tilewright_executor.IndexOutOfBounds", PyExc_IndexError, nullptr);
    if (PyModule_AddObjectRef(module, "IndexOutOfBounds", index_error)) return nullptr;
    name_nodes();
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
    return module;
}
