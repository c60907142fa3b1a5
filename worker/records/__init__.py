"""Result records: one line of OpenAI Batch output for each line of a job, read and written without torch."""
