"""The KV compressor: windows of tokens pooled to one entry each, normalised, rotated and packed in one launch."""
