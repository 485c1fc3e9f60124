"""bf16 and fp32 to the formats of `dsv4lib.formats` on the device, bit for bit; one source for SM90 and SM100."""
