/* Many driver calls at once: pygraph_trees.native._graph_nodes, an optional part of pygraph_trees.cuda.driver.

   search finds words in a range among the parameters of all kernels of a graph; set_kernels sets kernel nodes of an
   instantiated graph; address_of gives the address of a call. Errors raise RuntimeError("call", code) or OSError.
   No CUDA header is needed, and none of torch's but pybind11. native/DESIGN.md describes arguments and results. */

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace py = pybind11;

namespace {

constexpr int KERNEL = 0, INVALID_VALUE = 1;
constexpr size_t MOST_PARAMETERS = 4096, MOST_BYTES = 1 << 16;

/* CUDA_KERNEL_NODE_PARAMS_v2. */
struct Launch {
    void *function;
    unsigned int grid[3], block[3], shared;
    void **parameters;
    void **extra;
    void *kernel;
    void *context;
};

/* A kernel, with the layout of its parameters. */
struct Kernel {
    void *function, *kernel;
    bool was_asked = false, is_readable = false, is_needed = false;
    size_t nbytes = 0;
    std::vector<std::pair<size_t, size_t>> layout; // offset and size of each parameter
};

/* Throws for a call that returned an error code; -1 if the library lacks the call. */
[[noreturn]] void refuse(const std::string &call, int code) {
    PyErr_SetObject(PyExc_RuntimeError, py::make_tuple(call, code).ptr());
    throw py::error_already_set();
}

/* The address of a call in a library, which stays open: the process uses it anyway. */
template <typename Call> Call find(const std::string &library, const std::string &name) {
    void *opened = dlopen(library.c_str(), RTLD_NOW);
    if (opened == nullptr) {
        PyErr_Format(PyExc_OSError, "%s cannot be opened", library.c_str());
        throw py::error_already_set();
    }
    void *found = dlsym(opened, name.c_str());
    if (found == nullptr)
        refuse(name, -1);
    return reinterpret_cast<Call>(found);
}

template <typename Pointer> uint64_t number(Pointer *handle) { return reinterpret_cast<uintptr_t>(handle); }

class Reader {
  public:
    explicit Reader(const std::string &library)
        : list(find<List>(library, "cuGraphGetNodes")), get_type(find<GetType>(library, "cuGraphNodeGetType")),
          get_parameters(find<GetParameters>(library, "cuGraphKernelNodeGetParams_v2")),
          of_function(find<GetLayout>(library, "cuFuncGetParamInfo")),
          of_kernel(find<GetLayout>(library, "cuKernelGetParamInfo")), block(MOST_BYTES + 8) {}

    py::tuple search(void *graph, uint64_t low, uint64_t high) {
        py::list nodes, layouts, found;
        const std::vector<void *> handles = list_nodes(graph);
        for (size_t position = 0; position < handles.size(); position++) {
            int type = 0;
            if (const int code = get_type(handles[position], &type); code != 0)
                refuse("cuGraphNodeGetType", code);
            nodes.append(py::make_tuple(number(handles[position]), type));
            if (type == KERNEL)
                search_kernel(handles[position], position, low, high, found);
        }
        for (const Kernel &kernel : kernels) {
            py::object layout = py::none();
            if (kernel.is_readable && kernel.is_needed) {
                py::list places;
                for (const auto &[offset, nbytes] : kernel.layout)
                    places.append(py::make_tuple(offset, nbytes));
                layout = places;
            }
            layouts.append(py::make_tuple(number(kernel.function), number(kernel.kernel), layout));
        }
        return py::make_tuple(nodes, layouts, found);
    }

  private:
    using List = int (*)(void *graph, void **nodes, size_t *count);
    using GetType = int (*)(void *node, int *type);
    using GetParameters = int (*)(void *node, Launch *launch);
    using GetLayout = int (*)(void *function, size_t index, size_t *offset, size_t *nbytes);

    std::vector<void *> list_nodes(void *graph) const {
        size_t count = 0;
        int code = list(graph, nullptr, &count);
        std::vector<void *> handles(count);
        if (code == 0 && count != 0)
            code = list(graph, handles.data(), &count);
        if (code != 0)
            refuse("cuGraphGetNodes", code);
        handles.resize(count);
        return handles;
    }

    /* The record of a kernel, made at its first node. */
    Kernel &kernel_of(const Launch &launch) {
        for (Kernel &kernel : kernels)
            if (kernel.function == launch.function && kernel.kernel == launch.kernel)
                return kernel;
        return kernels.emplace_back(Kernel{launch.function, launch.kernel});
    }

    /* Asks until the driver refuses: the call that counts parameters needs CUDA 13.2. */
    void ask_layout(Kernel &kernel) const {
        for (;;) {
            size_t offset = 0, nbytes = 0;
            const size_t index = kernel.layout.size();
            const int code = kernel.function != nullptr ? of_function(kernel.function, index, &offset, &nbytes)
                                                        : of_kernel(kernel.kernel, index, &offset, &nbytes);
            if (code != 0) {
                kernel.is_readable = code == INVALID_VALUE;
                return;
            }
            kernel.layout.emplace_back(offset, nbytes);
            if (offset > MOST_BYTES || nbytes > MOST_BYTES || offset + nbytes > MOST_BYTES || index >= MOST_PARAMETERS)
                return; // the layout cannot be read
            kernel.nbytes = std::max(kernel.nbytes, offset + nbytes);
        }
    }

    /* Copies a node's parameters to the block; returns their size, or -1 if they cannot be read. */
    Py_ssize_t read_block(const Launch &launch, Kernel &kernel) {
        if (launch.extra != nullptr) {
            // Two pairs in either order: key 1 has the address of the parameters, key 2 the address of their size.
            const void *at = nullptr;
            size_t nbytes = 0;
            for (int i = 0; i < 4; i += 2) {
                if (number(launch.extra[i]) == 1)
                    at = launch.extra[i + 1];
                else if (number(launch.extra[i]) == 2)
                    nbytes = *static_cast<size_t *>(launch.extra[i + 1]);
                else
                    return -1;
            }
            if (at == nullptr || nbytes > MOST_BYTES)
                return -1;
            std::memset(block.data() + nbytes, 0, 8);
            std::memcpy(block.data(), at, nbytes);
            return static_cast<Py_ssize_t>(nbytes);
        }
        if (!kernel.was_asked)
            ask_layout(kernel);
        kernel.was_asked = true;
        // For a handle that the driver does not know, there seem to be no parameters.
        if (!kernel.is_readable || (launch.parameters != nullptr) == kernel.layout.empty())
            return -1;
        std::memset(block.data(), 0, kernel.nbytes + 8);
        for (size_t i = 0; i < kernel.layout.size(); i++)
            std::memcpy(block.data() + kernel.layout[i].first, launch.parameters[i], kernel.layout[i].second);
        return static_cast<Py_ssize_t>(kernel.nbytes);
    }

    void search_kernel(void *node, size_t position, uint64_t low, uint64_t high, py::list &found) {
        Launch launch{};
        if (get_parameters(node, &launch) != 0) {
            found.append(py::make_tuple(position, 0, 0, py::none(), py::none(), py::none()));
            return;
        }
        Kernel &kernel = kernel_of(launch);
        const uint64_t function = number(kernel.function), handle = number(kernel.kernel);
        const Py_ssize_t nbytes = read_block(launch, kernel);
        if (nbytes < 0) {
            found.append(py::make_tuple(position, function, handle, py::none(), py::none(), py::none()));
            return;
        }
        py::list hits;
        for (Py_ssize_t offset = 0; offset < nbytes; offset += 4) {
            uint64_t word = 0;
            std::memcpy(&word, block.data() + offset, sizeof word);
            if (low <= word && word < high)
                hits.append(py::make_tuple(offset, word));
        }
        if (hits.empty())
            return;
        kernel.is_needed = true;
        const auto *bytes = reinterpret_cast<const char *>(block.data());
        found.append(py::make_tuple(position, function, handle, py::bytes(bytes, static_cast<size_t>(nbytes)), hits,
                                    py::bytes(reinterpret_cast<const char *>(&launch), sizeof launch)));
    }

    List list;
    GetType get_type;
    GetParameters get_parameters;
    GetLayout of_function, of_kernel;
    std::vector<unsigned char> block; // the parameters of the latest kernel node, and 8 zeros
    std::deque<Kernel> kernels;       // records stay where they are
};

/* Sets kernel nodes from pairs of uint64; (position, code) of the first refused one, or None. */
py::object set_kernels(const std::string &library, uint64_t exec, const std::string &nodes) {
    using Set = int (*)(void *exec, void *node, const void *parameters);
    // Remembered for a library: a process has one driver, tests have another.
    static std::string found_in;
    static Set set = nullptr;
    if (nodes.size() % (2 * sizeof(uint64_t)) != 0)
        throw py::value_error("expected pairs of uint64");
    if (set == nullptr || found_in != library) {
        set = find<Set>(library, "cuGraphExecKernelNodeSetParams_v2");
        found_in = library;
    }
    for (size_t position = 0; position < nodes.size() / (2 * sizeof(uint64_t)); position++) {
        uint64_t pair[2];
        std::memcpy(pair, nodes.data() + position * sizeof pair, sizeof pair);
        const int code = set(reinterpret_cast<void *>(exec), reinterpret_cast<void *>(pair[0]),
                             reinterpret_cast<const void *>(pair[1]));
        if (code != 0)
            return py::make_tuple(position, code);
    }
    return py::none();
}

} // namespace

PYBIND11_MODULE(_graph_nodes, module) {
    module.doc() = "Many driver calls at once.";
    module.def("set_kernels", set_kernels, "Other parameters for kernels of an instantiated graph; see the source.");
    module.def(
        "address_of",
        [](const std::string &library, const std::string &name) { return number(find<void *>(library, name)); },
        "Where a call of the driver is; see the source.");
    module.def(
        "search",
        [](const std::string &library, uint64_t graph, uint64_t low, uint64_t high) {
            return Reader(library).search(reinterpret_cast<void *>(graph), low, high);
        },
        "Words in a range among the parameters of a graph's kernels; see the source.");
}
