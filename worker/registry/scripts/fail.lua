-- Refuse a job's file as a whole, under its plan's token: no line runs and none gets a record, so none is counted.
-- Not where the job is to end as cancelled or expired: its planner closes it then.
-- ARGV job id, token, reason, errors (JSON).
local job_id, token = ARGV[1], ARGV[2]
if not held_under(token, PLAN) then
  -- A client that lost the reply sends the same call again.
  return redis.call('HGET', JOB, 'plan_tok') == token and {'job_done', ''} or {'fenced', ''}
end
local job = redis.call('HMGET', JOB, 'cancel', 'deadline', 'cb')
local now = now_ms()
local mode = verdict(job[1], job[2], now)
if mode ~= 'run' then return {'open', mode} end
check_outbox(job[3])
local num_records = redis.call('HLEN', RES)
local prompts = redis.call('HGET', JOB, 'n') - num_records
redis.call('HSET', JOB, 'n', num_records, 'errors', ARGV[4], 'plan_tok', token)
close(job_id, 'failed', ARGV[3], prompts, now)
return {'job_done', ''}
