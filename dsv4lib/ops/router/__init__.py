"""Route tokens as DeepSeek-V4 does, as a torch op. It says which experts a token goes to, with what weights."""

from dsv4lib.ops.router.op import Hashed, Workspace, router, shares_of, tile_of, workspace

__all__ = ["Hashed", "Workspace", "router", "shares_of", "tile_of", "workspace"]
