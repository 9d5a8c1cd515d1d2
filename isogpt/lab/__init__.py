"""How do runs compare? Their records, statistics, pictures, and sweeps over settings."""
