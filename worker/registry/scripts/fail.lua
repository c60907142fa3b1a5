-- Refuse a job's file as a whole, under its plan's token: no line runs and none gets a record, so none is counted.
-- ARGV job id, token, reason, errors (JSON).
local job_id, token = ARGV[1], ARGV[2]
local held = redis.call('HMGET', PLAN, 'tok', 'st')
-- A client that lost the reply sends the same call again.
if not held[1] and redis.call('HGET', JOB, 'plan_tok') == token then return 1 end
if held[1] ~= token or held[2] ~= 'running' then return 0 end
local num_records = redis.call('HLEN', RES)
local prompts = redis.call('HGET', JOB, 'n') - num_records
redis.call('HSET', JOB, 'n', num_records, 'errors', ARGV[4], 'plan_tok', token)
close(job_id, 'failed', ARGV[3], prompts, now_ms())
return 1
