"""RMSNorm of rows, alone or behind the addition to the residual stream."""
