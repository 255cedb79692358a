/* Python's garbage collector, off while any replay or any `paused` of trees/pools/collector.py needs that, in whatever thread. */

#pragma once

#include "fast_path.h"

namespace pygraph {

/* Keeps the collector off while it exists. The count is protected by the GIL. */
class CollectorOff {
  public:
    CollectorOff() { enter(); }
    ~CollectorOff() { leave(); }
    CollectorOff(const CollectorOff &) = delete;
    CollectorOff &operator=(const CollectorOff &) = delete;

    static void enter() {
        if (inside++ == 0)
            was_on = PyGC_Disable() != 0;
    }

    static void leave() {
        if (inside != 0 && --inside == 0 && was_on) // 0 if this process was forked inside
            PyGC_Enable();
    }

    /* In a new process: the threads that were inside do not exist there. */
    static void forked() {
        if (inside != 0 && was_on)
            PyGC_Enable();
        inside = 0;
    }

  private:
    static inline int inside = 0;
    static inline bool was_on = false;
};

} // namespace pygraph
