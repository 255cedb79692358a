/* The candidates of a call, and what rules most of them out: pygraph_trees.native._fast_path.CandidateFilter.

   A filter looks at each output and each input once. Once at most one choice is left, it asks nothing more, so that one
   may not fit. native/DESIGN.md describes the arguments. */

#include <bit>
#include <map>

namespace {

/* Whether at most one choice is left in a row. */
bool is_decided(const std::vector<uint64_t> &left) {
    int count = 0;
    for (const uint64_t word : left)
        count += std::popcount(word);
    return count <= 1;
}

/* The facts that distinguish many choices. */
struct CandidateFilter {
    struct Output {
        PyObject *list;
        uint64_t index;
        size_t row; // start of the row of choices
    };
    struct Input {
        uint64_t index;
        size_t row;
        std::vector<std::pair<uint64_t, size_t>> addresses; // sorted, each with the start of a row
    };
    size_t count = 0, words = 0; // of a row
    std::vector<uint64_t> rows;
    std::vector<Output> held;
    std::vector<Input> places;

    void take(const py::dict &given) {
        count = given["count"].cast<size_t>();
        words = (count + 63) / 64;
        using Held = std::vector<std::tuple<py::list, uint64_t, std::string>>;
        for (const auto &[list, index, row] : given["held"].cast<Held>())
            held.push_back({reference(list), index, take_row(row)});
        using Places = std::vector<std::tuple<uint64_t, std::string, std::map<uint64_t, std::string>>>;
        for (const auto &[index, row, addresses] : given["places"].cast<Places>()) { // in the order of the addresses
            Input &input = places.emplace_back(Input{index, take_row(row), {}});
            for (const auto &[address, those] : addresses)
                input.addresses.emplace_back(address, take_row(those));
        }
    }

    void each(const auto &function) {
        for (Output &output : held)
            function(output.list);
    }

    /* Finds the first choice from `position` on that may fit, or their number; false if an input is no tensor. */
    bool sift(const Inputs &inputs, size_t *position) const {
        std::vector<uint64_t> left(words);
        for (size_t number = *position; number < count; number++)
            left[number / 64] |= uint64_t{1} << (number % 64);
        for (auto output = held.begin(); output < held.end() && !is_decided(left); output++) {
            PyObject *object = item_of(output->list, output->index);
            if (object != nullptr && object != Py_None && Py_REFCNT(object) != 1)
                for (size_t i = 0; i < words; i++)
                    left[i] &= ~rows[output->row + i];
        }
        for (auto input = places.begin(); input < places.end() && !is_decided(left); input++) {
            PyObject *object = inputs.at(input->index);
            if (!is_tensor(object))
                return false;
            const uint64_t address = address_of(THPVariable_Unpack(object));
            const auto here = std::lower_bound(input->addresses.begin(), input->addresses.end(),
                                               std::pair<uint64_t, size_t>(address, 0));
            const bool is_known = here != input->addresses.end() && here->first == address;
            for (size_t i = 0; i < words; i++)
                left[i] &= ~rows[input->row + i] | (is_known ? rows[here->second + i] : 0);
        }
        size_t word = 0;
        while (word < left.size() && left[word] == 0)
            word++;
        *position = word < left.size() ? word * 64 + static_cast<size_t>(std::countr_zero(left[word])) : count;
        return true;
    }

  private:
    /* Takes a row of bits, and returns where it begins. */
    size_t take_row(const std::string &bytes) {
        if (bytes.size() != words * sizeof(uint64_t))
            throw py::value_error("expected rows with a bit for each choice");
        rows.resize(rows.size() + words);
        std::memcpy(rows.data() + rows.size() - words, bytes.data(), bytes.size());
        return rows.size() - words;
    }
};

/* The recordings of one function at one place, in upstream's order. */
struct Candidates {
    PyObject *mode = nullptr, *compile_id = nullptr;
    PyObject *replays = nullptr;     // a tuple
    PyObject *filter = nullptr;      // a CandidateFilter, once several candidates have been asked often
    PyObject *make_filter = nullptr; // makes it
    PyObject *release = nullptr;     // releases unneeded outputs and returns whether there were any
    int begins = -1;                 // whether a new step must begin here; negative if it may or may not
    int asked = 0;

    void take(const py::dict &given) {
        begins = py::object(given["begins"]).is_none() ? -1 : given["begins"].cast<bool>();
        replays = reference(given["replays"].cast<py::tuple>());
        for (const py::handle replay : py::reinterpret_borrow<py::tuple>(replays))
            if (in<Replay>(replay.ptr()) == nullptr)
                throw py::type_error("expected a tuple of Replay objects");
        mode = reference(given["mode"]);
        compile_id = reference(given["compile_id"]);
        make_filter = reference(given["make_filter"]);
        release = reference(given["release"]);
    }

    void each(const auto &function) {
        for (PyObject **held : {&mode, &compile_id, &replays, &filter, &make_filter, &release})
            function(*held);
    }
};

PyObject *call_filter(PyObject *self, PyObject *arguments, PyObject *) {
    PyObject *list;
    Py_ssize_t begin = 0;
    const CandidateFilter *filter = in<CandidateFilter>(self);
    if (!PyArg_ParseTuple(arguments, "nO!", &begin, &PyList_Type, &list))
        return nullptr;
    return translated([&]() -> PyObject * {
        auto position = static_cast<size_t>(std::max<Py_ssize_t>(begin, 0));
        if (filter == nullptr || !filter->sift(Inputs(list, nullptr), &position))
            throw py::type_error("expected a tensor at each index");
        return PyLong_FromSize_t(position);
    });
}

} // namespace
