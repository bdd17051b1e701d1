"""KVarN: variance tables from the collection's second moments, and the VarN reference that reads them."""

from calibrate.kvarn.tables import KindTable, KVarNTables, LayerTable

__all__ = ["KVarNTables", "KindTable", "LayerTable"]
