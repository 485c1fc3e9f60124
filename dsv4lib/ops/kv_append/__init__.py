"""Store KV rows of new tokens in the window's rings, as a torch op. It is `dsv4::kv_append`."""

from dsv4lib.ops.kv_append.op import kv_append, settings_for

__all__ = ["kv_append", "settings_for"]
