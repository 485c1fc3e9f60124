"""Query heads normed and rotated, and the KV vector rotated, quantised and appended to its page, in one launch."""
