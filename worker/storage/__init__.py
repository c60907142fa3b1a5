"""Objects of S3, Google Cloud Storage, Azure and web servers, read and written as files of lines are."""
