"""From h5ad slices to Parquet shards to batches."""
