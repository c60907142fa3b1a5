-- Take a unit for a lease. ARGV job id, unit, worker, nonce, lease ms, max attempts, 1 if it would run alone, the names
-- of the model that the worker serves (JSON); whoever serves none may claim what is to be closed.
-- A client that lost the reply sends the same call again: its nonce shows that the lease is already its own.
-- A unit that crashed a worker is a suspect and runs alone from then on; one that crashed a worker alone is guilty. What
-- is guilty is split, down to the one prompt that kills, and only that one is ever lost.
local job_id, unit, worker, nonce, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[7]
local lease, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6])
local member = job_id .. '/' .. unit
local now = now_ms()
local job = redis.call('HMGET', JOB, 'st', 'cancel', 'deadline', 'n', 'pri', 'tenant', 'created', 'v', 'strict', 'url',
  'trace', 'pin', 'cb')
if not job[1] then
  redis.call('ZREM', OPEN, member)
  return {'gone'}
end
-- Of a newer version: left as it is. It is announced again and again, until a worker takes it that knows it.
local held = redis.call('HMGET', UNIT, 'st', 'lease', 'att', 'idx', 'tok', 'alone', 'guilty', 'first', 'head', 'turn',
  'model', 'term', 'judged')
local model = held[11] or nil -- HMGET says false
if job[8] ~= '1' and job[8] ~= '2' and job[8] ~= '3' and job[8] ~= '4' then
  dequeue(job[6], model, member)
  return {'newer'}
end
if not is_open(job[1]) or not held[1] then
  redis.call('ZREM', OPEN, member)
  dequeue(job[6], model, member)
  return {'terminal'}
end
local is_ours = held[1] == 'running' and string.sub(held[5], -#nonce - 1) == ':' .. nonce
local mode = verdict(job[2], job[3], now)
local has_lapsed = held[1] == 'running' and not is_ours
if has_lapsed then
  if not is_over(held[2], held[12], now) then return {'busy'} end
  if mode == 'run' and not is_judged(held[2], held[13]) then
    redis.call('ZADD', OPEN, now, member) -- for the reapers, see reap
    return {'busy'}
  end
end

local done, missing = {}, {}
if unit == 'plan' then
  done = redis.call('HKEYS', RES)
else
  for index in string.gmatch(held[4], '%d+') do
    if redis.call('HEXISTS', RES, index) == 1 then done[#done + 1] = index else missing[#missing + 1] = index end
  end
end

-- Every prompt has its record, though the unit was not told so: it ends here.
if unit ~= 'plan' and #missing == 0 then
  check_outbox(job[13])
  redis.call('UNLINK', UNIT)
  redis.call('ZREM', OPEN, member)
  dequeue(job[6], model, member)
  redis.call('HINCRBY', JOB, 'sd', 1)
  count_open(model, -1)
  if redis.call('HLEN', RES) >= tonumber(job[4]) then finish(job_id, now) end
  return {'terminal'}
end

local attempts, is_guilty = tonumber(held[3]), held[7] == '1'
-- A holder that is gone died or hung over this unit, see reap. Of a suspect only if it had begun to run alone: a claim
-- whose reply never came held a lease too.
if has_lapsed and is_gone(held[2], held[13]) and (attempts == 0 or held[6] == '1') then
  attempts = attempts + 1
  is_guilty = is_guilty or held[6] == '1'
end
if mode == 'run' and model then
  local is_served = false
  for _, name in ipairs(cjson.decode(ARGV[8])) do is_served = is_served or name == model end
  if not is_served then return {'other_model'} end
end
if mode == 'run' and unit ~= 'plan' and is_guilty and #missing > 1 then
  split(job_id, unit, missing,
    {first = held[8] or now, head = held[9] or '', turn = held[10] or now, tenant = job[6], model = model}, now)
  return {'split'}
end
if mode == 'run' and attempts >= max_attempts and (is_guilty or unit == 'plan') then
  mode = 'lost'
  if unit == 'plan' then redis.call('HSET', JOB, 'lost_plan', 1) end
  redis.call('ZADD', DEAD, now, member)
  redis.call('ZREMRANGEBYRANK', DEAD, 0, -10001)
  redis.call('EXPIRE', DEAD, 604800)
end
-- Nothing is written: the claim that runs it alone counts what happened.
if mode == 'run' and attempts > 0 and alone ~= '1' then return {'suspect'} end
-- The uuid tells apart two tokens of one number, should a failover take Redis back in time.
local token = held[5]
if not is_ours then token = redis.call('HINCRBY', UNIT, 'fence', 1) .. ':' .. nonce end
redis.call('HSET', UNIT, 'st', 'running', 'own', worker, 'tok', token, 'lease', now + lease, 'term', lease,
  'att', attempts, 'alone', 0, 'guilty', is_guilty and 1 or 0)
redis.call('HDEL', UNIT, 'doubt', 'judged')
redis.call('ZADD', OPEN, now + lease / 2, member) -- see reap
dequeue(job[6], model, member)
return {'ok', token, mode, time_left(job[3], now), attempts, tonumber(job[4]), tonumber(job[5]), job[6],
  tonumber(job[7]), held[4], done, held[9] or '', job[9] == '1' and 1 or 0, job[10] or '', job[11] or '',
  model or '', job[12] or ''}
