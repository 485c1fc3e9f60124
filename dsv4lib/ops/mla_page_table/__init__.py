"""Page tables of requests from a map of token slots, as a torch op: `torch.ops.dsv4.mla_page_table`."""

from dsv4lib.ops.mla_page_table.op import MisalignedPage, mla_page_table

__all__ = ["MisalignedPage", "mla_page_table"]
